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

from jaxserve.plan import EngineLimits, IntArray, SamplingParams, StepShape
from jaxserve.scheduling.admission import check_params, check_pool, check_prompt
from jaxserve.scheduling.arrivals import Arrivals, take_tokens
from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.pages import PagePool, PageTable
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request, RequestState, Submission
from jaxserve.scheduling.room import Room
from jaxserve.scheduling.shared_prompts import SharedPrompts
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.step import ScheduledStep, StepBuilder
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
    ) -> None:
        """Schedule for an engine of these limits.

        Args:
            limits: the engine's.
            max_chunk: the most prompt tokens in one step; by default as many as the largest shape holds.
                The rows of running requests count within it while they are few: see `_budget`.
            policy: who goes next.

        Raises ValueError if `max_chunk` is below 1 or above the largest shape.
        """
        largest = limits.chunk_shapes[-1]
        self.max_chunk = largest.rows if max_chunk is None else max_chunk
        if not 1 <= self.max_chunk <= largest.rows:
            raise ValueError(
                f"max_chunk {max_chunk} is out of range: it must be from 1 to {largest.rows}, "
                "the rows of the largest compiled step"
            )
        self.limits = limits
        # Every running request has a row in every step, also beside a prompt chunk.
        max_running = min(limits.num_slots, largest.rows, largest.sequences, largest.logit_rows)
        self._table = SlotTable(max_running, limits.page_size)
        self._pool = PagePool(limits.num_pages)
        self._queue = RequestQueue(policy, max_running)
        self._prompts = SharedPrompts(self._pool, limits)
        self._room = Room(limits, self.max_chunk, self._pool, self._table, self._prompts)
        self._heirs_due: list[Submission] = []
        self._grants: dict[int, list[tuple[int, int, int, int]]] = {}
        """The pages that the step in the making gives to running requests, by slot."""
        self._num_arrived = 0
        self.num_preemptions = 0
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
        """Pages of each cache group that nobody holds and no step in flight may still use."""
        return tuple(self._pool.num_free(group) for group in range(len(self.limits.num_pages)))

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not retired."""
        return len(self._in_flight)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as plain integers. Raises ValueError for what could never be served. Thread-safe."""
        prompt = check_prompt(prompt_token_ids, self.limits)
        check_params(params, self.limits)
        check_pool(len(prompt), self._max_tokens(prompt, params), self.limits)
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
            self._max_tokens(prompt, params),
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
        self._grants.clear()
        todo = self._table.todo()
        step, chunked = self._plan_running(todo, now)
        if num_preemptions == self.num_preemptions:  # All kept their pages, so there may be some for others.
            self._admit(step, now)
        for submission in self._heirs_due:
            self._queue_heirs(submission, now)
        self._heirs_due.clear()
        scheduled = step.build([grant for grants in self._grants.values() for grant in grants])
        if scheduled is not None:
            self._pool.begin_step()
            self._in_flight.append(scheduled)
            for request in (*chunked, *scheduled.admitted):
                if self._prompts.offer(request, int(self._table.computed[request.slot])):
                    self._heirs_due.append(request.submission)
        elif not self._in_flight and (todo.any() or self._could_start(now)):
            raise RuntimeError(
                f"no step can be planned: {self.num_running} samples run and {self.num_waiting} wait"
            )
        return scheduled

    def commit(self, step: ScheduledStep, tokens: IntArray) -> Arrivals:
        """Take the tokens of a step that has been collected: `tokens` holds one for each logit row."""
        self._queue.accounts.charge(step.accounts, 1)
        return take_tokens(self._table, step, tokens, self._is_eos)

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
            self._leave_slot(request)
        elif request.queued:
            self._queue.remove(request)
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
        self._pool.check_integrity([*holders, *self._prompts.holders()])
        if not (len(self._table) or len(self._queue)) and len(self._prompts):
            raise RuntimeError(f"{len(self._prompts)} shared prompts are held for nobody")

    def _max_tokens(self, prompt: list[int], params: SamplingParams) -> int:
        return self.limits.longest_answer(len(prompt), params.max_tokens)

    def _budget(self) -> StepShape:
        """The largest shape that the next step may take.

        A chunk and the running requests' rows together should fill the rung that the chunk alone would
        need, rather than spill a few rows into the next; unless that left less than half for the chunk.
        """
        num_running = self.num_running
        for shape in self.limits.chunk_shapes:
            enough = min(shape.sequences, shape.logit_rows) >= num_running
            if enough and shape.rows >= max(self.max_chunk, 2 * num_running):
                return shape
        return self.limits.chunk_shapes[-1]

    # Running requests ------------------------------------------------------------------------------------

    def _plan_running(self, todo: IntArray, now: float) -> tuple[StepBuilder, list[Request]]:
        """A step with the rows of the running requests, and those of them that compute several."""
        table, order = self._table, self._table.order
        asked = todo[order]
        longer: list[int] = order[asked > 1].tolist()
        decoding = self._find_pages(order[asked == 1], now)
        step = StepBuilder(self.limits, table, self._budget(), self.max_chunk, decoding)
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

    def _find_pages(self, decoding: IntArray, now: float) -> IntArray:
        """Those of the slots that have a page for their next token, after preempting others if need be."""
        table = self._table
        computed = table.computed[decoding]
        for slot in decoding[computed >= table.next_pass[decoding]].tolist():
            self._pass_window(table.at(slot))
        held_up: list[int] = []
        short: list[int] = decoding[computed >= table.capacity[decoding]].tolist()
        for slot in short:
            request = table.requests[slot]
            if request is not None:
                if self._make_room(request, now):
                    self._grow(request, int(table.computed[slot]) + 1)
                else:
                    held_up.append(slot)
        keep = table.serial[decoding] >= 0
        if held_up:
            keep &= ~np.isin(decoding, held_up)
        return decoding if keep.all() else decoding[keep]

    def _plan_chunk(self, request: Request, todo: int, step: StepBuilder, now: float) -> bool:
        """Give the request as many rows as there are; return whether there was one."""
        computed = int(self._table.computed[request.slot])
        if computed >= self._table.next_pass[request.slot]:
            self._pass_window(request)
        # Nobody decodes and nothing is under way: pages will come only from other running requests.
        stuck = step.empty and not self._in_flight
        available = request.table.num_tokens_available(computed)
        if available < 1 and stuck and self._make_room(request, now):
            available = request.table.num_tokens_available(computed)
        chunk = step.next_chunk(request, computed, todo, available)
        if chunk.num_tokens < 1:
            return False
        self._grow(request, computed + chunk.num_tokens)
        step.add(request, chunk, todo)
        return True

    def _grow(self, request: Request, num_tokens: int) -> None:
        slot = request.slot
        grown = request.table.grow(num_tokens)
        if grown:
            granted = self._grants.setdefault(slot, [])
            granted += [(group, slot, index, page) for group, index, page in grown]
            self._table.follow_pages(request)

    def _pass_window(self, request: Request) -> None:
        request.table.pass_window(int(self._table.computed[request.slot]))
        self._table.follow_pages(request)

    def _make_room(self, request: Request, now: float) -> bool:
        """Whether a page is free in every group, after taking from others what it takes."""
        while not self._pool.num_free_everywhere:
            if self._pool.returning:
                return False
            if self._prompts.release_latest():
                continue
            victim = self._victim()
            self._preempt(victim, now)
            if victim is request:
                return False
        return True

    def _victim(self) -> Request:
        """The running request whose preemption costs least."""
        computed = self._table.computed
        return min(
            self._table.running,
            key=lambda request: self._queue.victim_key(request, int(computed[request.slot])),
        )

    def _preempt(self, request: Request, now: float) -> None:
        request.advance(RequestState.PREEMPTED)
        self._leave_slot(request)
        self.num_preemptions += 1
        self._queue.push(request, now)

    def _leave_slot(self, request: Request) -> None:
        self._grants.pop(request.slot, None)
        self._table.leave(request)
        self._queue.leave(request)
        request.table.clear()

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
            if ready and self._room.find(request, promised, idle=idle):
                self._start(request, step)
                self._room.promise(request, promised)
            else:
                num_passed += 1
                if num_passed > _MAX_PASSED or not self._queue.set_aside(request, now):
                    return

    def _yield_slot(self, request: Request, now: float) -> bool:
        """Preempt a less urgent request for one whose class has fewer slots than are reserved for it."""
        if not self._queue.below_floor(request):
            return False
        victim = self._victim()
        if not self._queue.precedes(request, victim):
            return False
        self._preempt(victim, now)
        return True

    def _start(self, request: Request, step: StepBuilder) -> None:
        prefix = self._prompts.find(request)
        copies: list[tuple[int, int, int]] = []
        num_computed = 0
        if prefix is not None:
            copies, num_computed = request.table.adopt(prefix), prefix.num_tokens
        todo = request.num_known - num_computed
        chunk = step.next_chunk(request, num_computed, todo, request.table.num_tokens_available(num_computed))
        request.table.grow(num_computed + chunk.num_tokens)
        account = self._queue.start(request, num_computed)
        request.advance(RequestState.RUNNING)
        request.num_admissions += 1
        self._table.enter(request, num_computed, account, self._queue.rank(request))
        step.load(request, num_computed, copies)
        step.add(request, chunk, todo)
        self._prompts.drop_heir(request)

    def _could_start(self, now: float) -> bool:
        """Whether nothing runs and yet the next request waits, though all it waited for has come."""
        request = self._queue.peek(now)
        return not (self.num_running or request is None or request.held)

    def _queue_heirs(self, submission: Submission, now: float) -> None:
        for heir in submission.heirs:
            self._queue.push(heir, now)
