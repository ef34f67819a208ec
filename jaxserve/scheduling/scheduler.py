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

from collections.abc import Sequence

import numpy as np

from jaxserve.plan import EngineLimits, IntArray, SamplingParams
from jaxserve.scheduling.admission import check_params, check_pool, check_prompt
from jaxserve.scheduling.arrivals import Arrivals, take_tokens
from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.page_swap import PageSwap
from jaxserve.scheduling.pages import PagePool, PageTable
from jaxserve.scheduling.prefix_cache import CacheIdentity, PrefixCache
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request, RequestState, Submission
from jaxserve.scheduling.room import Room, Start
from jaxserve.scheduling.running_pages import RunningPages
from jaxserve.scheduling.shared_prompts import SharedPrompts
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.step import ScheduledStep, StepBuilder
from jaxserve.scheduling.step_budget import TokenBudget
from jaxserve.scheduling.terms import DEFAULT_TERMS, ServiceTerms

DEFAULT_POLICY = SchedulerPolicy()
_MAX_PASSED = 4
"""Waiting requests without room that a step's planning looks past."""


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
    ) -> None:
        """Schedule for an engine of these limits.

        Args:
            limits: the engine's.
            max_chunk: the most prompt tokens in one step; by default as many as the largest shape holds.
                The rows of running requests count within it while they are few: see `TokenBudget`.
            policy: who goes next.
            cache: what the engine's keys and values depend on; None reuses no prefix.
            swap: keeps cached pages beyond the pool; None keeps none.

        Raises ValueError if `max_chunk` is below 1 or above the largest shape, or for `swap` without `cache`.
        """
        if swap is not None and cache is None:
            raise ValueError("pages are kept beyond the pool for prefixes to be reused, which is off")
        largest = limits.chunk_shapes[-1]
        self.limits = limits
        self.budget = TokenBudget(limits, max_chunk=max_chunk)
        """How much prompt goes into a step; it wants to hear how long steps take."""
        self.max_chunk = largest.rows if max_chunk is None else max_chunk
        # Every running request has a row in every step, also beside a prompt chunk.
        max_running = min(limits.num_slots, largest.rows, largest.sequences, largest.logit_rows)
        self._table = SlotTable(max_running, limits.page_size)
        self._pool = PagePool(limits.num_pages)
        self._queue = RequestQueue(policy, max_running, score=self._num_cached)
        self.cache = (
            None
            if cache is None
            else PrefixCache(cache, self._pool, limits, self.budget.seconds_per_token, swap)
        )
        self._prompts = SharedPrompts(self._pool, limits, self.cache)
        self._room = Room(limits, self.max_chunk, self._pool, self._table, self._prompts, self.cache)
        self._pages = RunningPages(self._pool, self._table, self._queue, self._prompts, self.cache)
        self._heirs_due: list[Submission] = []
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
        """Requests in the queue; samples that wait for their prompt's first one are not in it yet."""
        return len(self._queue)

    @property
    def num_free_pages(self) -> tuple[int, ...]:
        """Pages of each cache group that no request holds and no step in flight may still use."""
        groups = range(len(self.limits.num_pages))
        evictable = [0 if self.cache is None else self.cache.num_evictable(group) for group in groups]
        return tuple(self._pool.num_free(group) + evictable[group] for group in groups)

    @property
    def num_preemptions(self) -> int:
        """Slots taken back before their requests had ended, since the beginning."""
        return self._pages.num_preemptions

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
            table = PageTable(self._pool, self.limits.page_size, self.limits.windows)
            submission.requests.append(Request(submission, index, (submission.arrival, index), table))
        submission.heirs.update(submission.requests[1:])
        self._queue.push(submission.leader, now)
        if self._prompts.num_shareable(len(prompt)):
            submission.awaits_prefix = params.n > 1
        else:
            self._queue_heirs(submission, now)
        return submission

    def expire(self, now: float) -> list[Request]:
        """Requests whose deadline has passed, for the caller to `finish` before they cost more."""
        table = self._table
        late = np.flatnonzero((table.deadline <= now) & (table.serial >= 0))
        return self._queue.expire(now) + [table.at(slot) for slot in late.tolist()]

    def plan(self, now: float = 0.0) -> ScheduledStep | None:
        """The next step, which the caller must dispatch, or None if nothing can be computed just now.

        None with no step in flight means that there is nothing to do, or that everything is held.
        """
        num_preemptions = self.num_preemptions
        self._pages.grants.clear()
        todo = self._table.todo()
        step, chunked = self._plan_running(todo, now)
        all_stay = num_preemptions == self.num_preemptions
        if all_stay or not (self.num_running or self._in_flight):
            self._admit(step, now)  # There may be pages for others.
        for submission in self._heirs_due:
            self._queue_heirs(submission, now)
        self._heirs_due.clear()
        scheduled = step.build([grant for grants in self._pages.grants.values() for grant in grants])
        if scheduled is not None:
            self._pool.begin_step()
            self._in_flight.append(scheduled)
            for request in (*chunked, *scheduled.admitted):
                num_computed = int(self._table.computed[request.slot])
                if self.cache is not None:
                    self.cache.store(request, min(num_computed, request.num_known))
                if self._prompts.offer(request, num_computed):
                    self._heirs_due.append(request.submission)
        elif not self._in_flight and (todo.any() or self._could_start(now)):
            raise RuntimeError(
                f"no step can be planned: {self.num_running} samples run and {self.num_waiting} wait"
            )
        return scheduled

    def commit(self, step: ScheduledStep, tokens: IntArray) -> Arrivals:
        """Take the tokens of a step that has been collected: `tokens` holds one for each logit row."""
        self._queue.accounts.charge(step.accounts, 1)
        arrivals = take_tokens(self._table, step, tokens, self._is_eos)
        if self.cache is not None:
            self._store_pages(self.cache, step.slots)
        return arrivals

    def retire(self, step: ScheduledStep) -> None:
        """The oldest step in flight has been collected; pages that waited for it may be used again."""
        if not self._in_flight or self._in_flight[0] is not step:
            raise RuntimeError("steps retire in the order in which they were planned")
        self._in_flight.pop(0)
        self._pool.retire_step()

    def resume(self, request: Request) -> None:
        """The caller has seen the latest token of a gated request, which may go on."""
        request.held = False
        if request.slot >= 0:
            self._table.held[request.slot] = False

    def finish(self, request: Request, state: RequestState) -> None:
        """End a request, from whichever state, and take back what it holds."""
        running = request.state is RequestState.RUNNING
        request.advance(state)
        if running:
            self._pages.take_back(request)
        elif request.queued:
            self._queue.remove(request)
        if self.cache is not None:
            self.cache.forget(request)
        self._prompts.drop_heir(request)

    def abandon_steps(self) -> None:
        """The device is lost: no step in flight will ever be collected."""
        while self._in_flight:
            self.retire(self._in_flight[0])

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pages, slots and queue account for one another.

        With nothing running this means that every page and slot is free, or held for waiting samples.
        """
        self._table.check_integrity()
        holders = [request.table.pages for request in self._table.running]
        holders += self._prompts.holders()
        if self.cache is not None:
            self.cache.check_integrity(self.num_running)
            holders += self.cache.holders()
        self._pool.check_integrity(holders)
        if not (len(self._table) or len(self._queue)) and len(self._prompts):
            raise RuntimeError(f"{len(self._prompts)} shared prompts are held for nobody")

    # Running requests ------------------------------------------------------------------------------------

    def _plan_running(self, todo: IntArray, now: float) -> tuple[StepBuilder, list[Request]]:
        """A step with the rows of the running requests, and those of them that compute several."""
        table, order = self._table, self._table.order
        asked = todo[order]
        longer: list[int] = order[asked > 1].tolist()
        decoding = self._pages.find(order[asked == 1], now)
        step = StepBuilder(self.limits, table, self._max_prompt_rows(decoding, longer), decoding)
        chunked: list[Request] = []
        for index, slot in enumerate(longer):
            request = table.requests[slot]
            if request is None:
                continue  # Preempted by one that decodes.
            step.num_reserved = len(longer) - index - 1
            if self._plan_chunk(request, int(todo[slot]), step, now):
                chunked.append(request)
        step.num_reserved = 0
        return step, chunked

    def _max_prompt_rows(self, decoding: IntArray, longer: list[int]) -> int:
        """Prompt tokens that the next step may compute beside those that decode."""
        if not longer and not (self._table.has_free and len(self._queue)):
            return self.max_chunk  # Nobody asks.
        tightest = self._table.tpot_target[decoding].min(initial=np.inf)
        return self.budget.budget(len(decoding), float(tightest))

    def _plan_chunk(self, request: Request, todo: int, step: StepBuilder, now: float) -> bool:
        """Give the request as many rows as there are; return whether there was one."""
        computed = int(self._table.computed[request.slot])
        if computed >= self._table.next_pass[request.slot]:
            self._pages.pass_window(request)
        self._pages.make_free(min(todo, self.max_chunk) // self.limits.page_size + 1)
        # Nobody decodes and nothing is under way: pages will come only from other running requests.
        stuck = step.empty and not self._in_flight
        available = request.table.num_tokens_available(computed)
        if available < 1 and stuck and self._pages.make_room(request, now):
            available = request.table.num_tokens_available(computed)
        chunk = step.next_chunk(request, computed, todo, available)
        if chunk.num_tokens < 1:
            return False
        self._pages.grow(request, computed + chunk.num_tokens)
        step.add(request, chunk, todo)
        return True

    # Waiting requests ------------------------------------------------------------------------------------

    def _admit(self, step: StepBuilder, now: float) -> None:
        if not len(self._queue):
            return
        self._queue.begin_round()
        promised: list[int] | None = None
        num_passed = 0
        while not step.full and (request := self._queue.peek(now)) is not None:
            if not (self._table.has_free or self._yield_slot(request, now)):
                return
            promised = promised or self._room.promised()
            # A token of a preempted request may be under way; its slot is filled when that is known.
            ready = not (request.num_pending or request.held)
            idle = not (self.num_running or self._in_flight)
            start = self._room.find(request, promised, idle=idle) if ready else None
            if start is not None:
                self._start(request, start, step)
                self._room.promise(request, promised)
            else:
                num_passed += 1
                if num_passed > _MAX_PASSED or not self._queue.set_aside(request, now):
                    return

    def _yield_slot(self, request: Request, now: float) -> bool:
        """Preempt a less urgent request for one whose class has fewer slots than are reserved for it."""
        if not self._queue.below_floor(request):
            return False
        victim = self._pages.victim()
        if not self._queue.precedes(request, victim):
            return False
        self._pages.preempt(victim, now)
        return True

    def _start(self, request: Request, start: Start, step: StepBuilder) -> None:
        copies: list[tuple[int, int, int]] = []
        num_computed = 0
        if self.cache is not None:
            if start.prefix is not None and start.match is None:
                self.cache.start_shared(request)
            else:
                self.cache.start(request, start.match)
        if start.prefix is not None:
            copies, num_computed = request.table.adopt(start.prefix), start.prefix.num_tokens
        if self.cache is not None and start.beyond is not None:
            num_computed += self.cache.restore(request, start.beyond)
        if num_computed and not request.num_admissions and not request.sample_index:
            request.submission.num_cached = num_computed
        todo = request.num_known - num_computed
        chunk = step.next_chunk(request, num_computed, todo, request.table.num_tokens_available(num_computed))
        request.table.grow(num_computed + chunk.num_tokens)
        account = self._queue.start(request, num_computed)
        request.advance(RequestState.RUNNING)
        request.num_admissions += 1
        self._table.enter(request, num_computed, account, self._queue.priority_class(request))
        step.load(request, num_computed, copies)
        step.add(request, chunk, todo)
        self._prompts.drop_heir(request)

    def _store_pages(self, cache: PrefixCache, slots: IntArray) -> None:
        """Add the pages to the cache that have become full, computed and known to the host."""
        table, page_size = self._table, self.limits.page_size
        known = table.known[slots] - table.pending[slots]
        num_full = np.minimum(known, table.computed[slots]) // page_size
        due = (num_full > table.num_stored[slots]) & (table.serial[slots] >= 0)
        for slot, num_pages in zip(slots[due].tolist(), num_full[due].tolist(), strict=True):
            table.num_stored[slot] = num_pages
            cache.store(table.at(slot), num_pages * page_size)

    def _num_cached(self, request: Request) -> int:
        """Tokens of a waiting request that it could start on."""
        match = None if self.cache is None else self.cache.match(request)
        return 0 if match is None else match.num_tokens

    def _could_start(self, now: float) -> bool:
        """Whether nothing runs and yet the next request waits, though all it waited for has come."""
        request = self._queue.peek(now)
        return not (self.num_running or request is None or request.held)

    def _queue_heirs(self, submission: Submission, now: float) -> None:
        for heir in submission.heirs:
            self._queue.push(heir, now)
