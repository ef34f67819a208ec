"""Continuous batching: which requests compute how many tokens in the next step, and on which pages.

Every running request that only decodes has a row in every step; what is left of the step goes to those that
have more to compute, in the order of their arrival, and then to waiting ones. When pages run out, the request
that loses least work gives up its own and recomputes later. The one that has most work done is never that
one, so it moves on, and by induction every request ends.

The scheduler runs ahead of the device by as many steps as its caller likes: it counts what planned steps
will have done, and a page that it takes back is given out again only when the steps that may use it have
retired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.plan import EngineLimits, IntArray, SamplingParams
from jaxserve.scheduling.admission import check_params, check_pool, check_prompt
from jaxserve.scheduling.arrivals import Arrivals, take_tokens
from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.drafting import Drafting
from jaxserve.scheduling.joint_step import join_parts
from jaxserve.scheduling.lending import Lending
from jaxserve.scheduling.newcomers import HURDLES, Hurdle, Newcomers
from jaxserve.scheduling.page_swap import PageSwap
from jaxserve.scheduling.pages import PagePool, PageTable
from jaxserve.scheduling.prefix_cache import CacheIdentity
from jaxserve.scheduling.prefix_caches import PrefixCaches
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.replica import Replica, slots_of_replicas
from jaxserve.scheduling.request import Request, RequestState, Submission
from jaxserve.scheduling.running_rows import RunningRows
from jaxserve.scheduling.slots import Cohort, SlotTable
from jaxserve.scheduling.step import Round, ScheduledStep, StepBuilder
from jaxserve.scheduling.step_budget import TokenBudget
from jaxserve.scheduling.terms import DEFAULT_TERMS, ServiceTerms
from jaxserve.speculation import Speculation

DEFAULT_POLICY = SchedulerPolicy()


class Scheduler:
    """Owns the queue, the slots and the pages of one engine. Not safe for use from several threads."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        max_chunk: int | None = None,
        policy: SchedulerPolicy = DEFAULT_POLICY,
        cache: CacheIdentity | None = None,
        swap: PageSwap | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """Schedule for an engine of these limits.

        Args:
            limits: the engine's.
            max_chunk: the most prompt tokens in one step; by default as many as the largest shape holds.
                The rows of running requests count within it while they are few: see `TokenBudget`.
            policy: who goes next.
            cache: what the engine's keys and values depend on; None reuses no prefix.
            swap: keeps cached pages beyond the pool; None keeps none.
            speculation: how answers are drafted; None verifies no drafts.

        Raises ValueError if `max_chunk` is below 1 or above the largest shape, for `swap` or the order
        "longest-prefix" without `cache`, or for more drafts than the engine verifies.
        """
        if swap is not None and cache is None:
            raise ValueError("pages are kept beyond the pool for prefixes to be reused, which is off")
        largest = limits.chunk_shapes[-1]
        self.limits = limits
        self.budget = TokenBudget(limits, max_chunk=max_chunk)
        """How much prompt goes into a step; it wants to hear how long steps take."""
        self.max_chunk = largest.rows if max_chunk is None else max_chunk
        self._table = SlotTable(slots_of_replicas(limits), limits.page_size)
        pools = [PagePool(limits.num_pages) for _ in range(limits.num_replicas)]
        self.cache = (
            None if cache is None else PrefixCaches(cache, pools, limits, self.budget.seconds_per_token, swap)
        )
        self._queue = RequestQueue(policy, score=None if self.cache is None else self.cache.num_cached)
        shared: Any = {
            "limits": limits,
            "max_chunk": self.max_chunk,
            "table": self._table,
            "queue": self._queue,
        }
        caches = [None] * len(pools) if self.cache is None else self.cache.caches
        self._replicas = tuple(
            Replica.of(number, pool, own, **shared)
            for number, (pool, own) in enumerate(zip(pools, caches, strict=True))
        )
        self.drafting = (
            None
            if speculation is None
            else Drafting(speculation, limits, self._table, [one.pages for one in self._replicas], pools[0])
        )
        self._rows = RunningRows(
            limits, self.max_chunk, self._table, self._queue, self._replicas, self.budget, self.drafting
        )
        self._lending = Lending(self._queue, self.cache, limits.page_size)
        self._newcomers = Newcomers(self._table, self._queue, self._replicas, self.cache, self.budget)
        self.num_kept_out: dict[Hurdle, int] = dict.fromkeys(HURDLES, 0)
        """Steps that left requests waiting, by what these waited for; since the beginning."""
        self._num_arrived = 0
        self._in_flight: list[ScheduledStep] = []
        self._is_eos = np.zeros(limits.vocab_size, np.bool_)
        self._is_eos[list(limits.eos_token_ids)] = True

    @property
    def num_running(self) -> int:
        return len(self._table)

    @property
    def running(self) -> list[Request]:
        """The requests in slots, in the order in which they are served."""
        return self._table.running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that are lent; samples that wait for their prompt's first one are
        not in it yet."""
        return len(self._queue) + len(self._lending)

    @property
    def num_free_pages(self) -> tuple[int, ...]:
        """Pages of each cache group, in all replicas, that no request holds and no step in flight may still
        use."""
        return tuple(map(sum, zip(*(one.num_free_pages for one in self._replicas), strict=True)))

    @property
    def num_preemptions(self) -> int:
        """Slots taken back before their requests had ended, since the beginning."""
        return sum(one.pages.num_preemptions for one in self._replicas)

    @property
    def num_recomputed(self) -> int:
        """Tokens that preempted requests had computed, and did not find again when they went on."""
        return self._newcomers.num_recomputed

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not retired."""
        return len(self._in_flight)

    def max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """The longest answer to a prompt of so many tokens. Thread-safe."""
        return self.limits.longest_answer(prompt_len, params.max_tokens)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as plain integers. Raises ValueError for what could never be served. Thread-safe."""
        prompt = check_prompt(prompt_token_ids, self.limits)
        check_params(params, self.limits)
        check_pool(len(prompt), self.max_tokens(len(prompt), params), self.limits)
        return prompt

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        terms: ServiceTerms = DEFAULT_TERMS,
        now: float = 0.0,
    ) -> Submission:
        """Queue the prompt's `n` requests. Raises ValueError as `check` does."""
        prompt = self.check(prompt_token_ids, params)
        submission = Submission(
            request_id,
            self._num_arrived,
            prompt,
            params,
            seed,
            self.max_tokens(len(prompt), params),
            frozenset[int]() if params.ignore_eos else frozenset(self.limits.eos_token_ids),
            frozenset(params.stop_token_ids),
            terms,
            now,
        )
        self._num_arrived += 1
        for index in range(params.n):
            table = PageTable(self._replicas[0].pool, self.limits.page_size, self.limits.windows)
            submission.requests.append(Request(submission, index, (submission.arrival, index), table))
        submission.heirs.update(submission.requests[1:])
        self._queue.push(submission.leader, now)
        if self._replicas[0].prompts.num_shareable(len(prompt)):
            submission.awaits_prefix = params.n > 1
        else:
            self._queue_heirs(submission, now)
        return submission

    def expire(self, now: float) -> list[Request]:
        """Requests whose deadline has passed, for the caller to `finish` before they cost more."""
        table = self._table
        expired, late = self._queue.expire(now) + self._lending.expired(now), table.deadline <= now
        if late.any():
            expired += [table.at(slot) for slot in late.nonzero()[0].tolist()]
        return expired

    def lend(self, now: float, has_room: Callable[[int], bool]) -> Request | None:
        """A waiting request whose text, but for its last token, is to be computed elsewhere: see `Lending`.
        It comes back by `give_back`, unless it is finished before."""
        return self._lending.lend(now, has_room)

    def give_back(self, request: Request, now: float) -> None:
        """A request that was lent waits for a slot, with what is `prefilled` of it."""
        self._lending.give_back(request, now)

    def has_room_for(self, lengths: Sequence[int]) -> bool:
        """Whether the pool, where it is one, would hold waiting texts of so many tokens beside those that
        run."""
        return self._replicas[0].room.would_hold(lengths)

    def plan(self, now: float = 0.0) -> ScheduledStep | None:
        """The next step, which the caller must dispatch, or None if nothing can be computed just now, or is
        to follow drafts that a step in flight will bring.

        None with no step in flight means that there is nothing to do, that everything is held, or that one
        has given way and the next call will start others.
        """
        if self._in_flight and self.drafting is not None and self.drafting.active:
            return None
        for replica in self._replicas:
            replica.pages.grants.clear()
        self._newcomers.make_way(now)
        num_preemptions = [replica.pages.num_preemptions for replica in self._replicas]
        in_flight = self._who_is_in_flight()
        todo = self._table.todo()
        steps, chunked = self._rows.plan(todo, now, in_flight)
        open_to: dict[int, StepBuilder] = {}
        for number, replica in enumerate(self._replicas):
            all_stay = num_preemptions[number] == replica.pages.num_preemptions
            if all_stay or not (self._table.num_taken_in(number) or in_flight[number]):
                open_to[number] = steps[number]  # There may be pages for others.
        hurdle = self._newcomers.admit(open_to, now, in_flight) if open_to else "pages"
        if self.limits.max_iterations > 1 and not len(self._queue):
            self._rows.iterate(steps)
        scheduled = self._build(steps)
        if scheduled is not None:
            self._begin(scheduled, chunked, now)
            if hurdle is not None and len(self._queue):
                self.num_kept_out[hurdle] += 1
        elif len(open_to) == len(steps) and not self._in_flight and (todo.any() or self._could_start(now)):
            raise RuntimeError(
                f"no step can be planned: {self.num_running} samples run and {self.num_waiting} wait"
            )
        return scheduled

    def commit(self, part: Round, tokens: IntArray) -> Arrivals:
        """Take the tokens of a step that has been collected and retired, one of its rounds after the other.

        `tokens` are those of the step's result. Requests that ended meanwhile take none, and have to be
        finished before the next round's are taken.
        """
        self._charge(part.cohort)
        arrivals = take_tokens(self._table, part, tokens, self._is_eos)
        if self.drafting is not None and not part.foreseen:
            self.drafting.accept(arrivals.requests)
        if self.cache is not None:
            own = zip(self.cache.caches, self._table.by_replica(part.cohort.slots), strict=True)
            for cache, slots in own:
                cache.store_full(self._table, slots)
        return arrivals

    def retire(self, step: ScheduledStep) -> None:
        """The oldest step in flight has been collected; pages that waited for it may be used again."""
        if not self._in_flight or self._in_flight[0] is not step:
            raise RuntimeError("steps retire in the order in which they were planned")
        self._in_flight.pop(0)
        for replica in self._replicas:
            replica.pool.retire_step()

    def resume(self, request: Request) -> None:
        """The caller has seen the latest token of a gated request, which may go on."""
        request.held = False
        if request.slot >= 0:
            self._table.held[request.slot] = False

    def finish(self, request: Request, state: RequestState) -> None:
        """End a request, from whichever state, and take back what it holds."""
        running = request.state is RequestState.RUNNING
        request.advance(state)
        self._queue.settle(request)
        if running:
            self._replica_of(request).pages.take_back(request)
        elif request.queued:
            self._queue.remove(request)
        self._lending.forget(request)
        if self.cache is not None:
            self.cache.forget(request)
        if self.drafting is not None:
            self.drafting.forget(request)
        for replica in self._replicas:
            replica.prompts.drop_heir(request)

    def abandon_steps(self) -> None:
        """The device is lost: no step in flight will ever be collected."""
        while self._in_flight:
            self.retire(self._in_flight[0])

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pages, slots and queue account for one another.

        With nothing running this means that every page and slot is free, or held for waiting samples.
        """
        self._table.check_integrity()
        for replica in self._replicas:
            replica.check_integrity(self._table.running_in(replica.number))
            if not (len(self._table) or self.num_waiting) and len(replica.prompts):
                raise RuntimeError(f"{len(replica.prompts)} shared prompts are held for nobody")

    # Pieces ----------------------------------------------------------------------------------------------

    def _replica_of(self, request: Request) -> Replica:
        """Of a running request."""
        return self._replicas[self._table.replica_of(request.slot)]

    def _who_is_in_flight(self) -> list[bool]:
        """Of each replica, whether a step is under way that it has a part in."""
        if len(self._replicas) == 1:
            return [bool(self._in_flight)]
        parts = [step.parts or {} for step in self._in_flight]
        return [any(replica.number in own for own in parts) for replica in self._replicas]

    def _build(self, steps: Sequence[StepBuilder]) -> ScheduledStep | None:
        """The step of these parts, one of each replica; None if they are all empty."""
        if len(self._replicas) == 1:
            return steps[0].build(self._replicas[0].pages.all_grants)
        parts: dict[int, ScheduledStep] = {}
        for number, replica in enumerate(self._replicas):
            part = steps[number].build(replica.pages.all_grants)
            if part is not None:
                parts[number] = part
        return join_parts(parts, self.limits, self._table) if parts else None

    def _begin(self, scheduled: ScheduledStep, chunked: list[Request], now: float) -> None:
        """A step has been planned; those in `chunked` and those it admits compute prompts."""
        for replica in self._replicas:
            replica.pool.begin_step()
        self._in_flight.append(scheduled)
        for request in (*chunked, *scheduled.admitted):
            replica, num_computed = self._replica_of(request), int(self._table.computed[request.slot])
            if replica.cache is not None:
                replica.cache.store(request, min(num_computed, request.num_known))
            if replica.prompts.offer(request, num_computed):
                self._queue_heirs(request.submission, now)

    def _charge(self, cohort: Cohort) -> None:
        """Charge the tokens that a step brings to answers that are longer than was expected."""
        table = self._table
        late = table.num_arrived(cohort.slots) >= cohort.prepaid
        if late.any():
            if not table.in_place(cohort):
                late &= table.serial[cohort.slots] == cohort.serials
            self._queue.accounts.charge(cohort.accounts[late], 1)

    def _could_start(self, now: float) -> bool:
        """Whether nothing runs and yet the next request waits, though all it waited for has come."""
        request = self._queue.peek(now)
        return not (self.num_running or request is None or request.held)

    def _queue_heirs(self, submission: Submission, now: float) -> None:
        for heir in submission.heirs:
            self._queue.push(heir, now)
