"""Continuous batching: which requests compute how many tokens in the next step, and on which pages.

Running requests are served in the order of their arrival, then waiting ones are admitted in that order.
When pages run out, the latest arrived gives up its own and recomputes later. So the earliest request
always moves on, and by induction every one ends.

The scheduler runs ahead of the device by as many steps as its caller likes: it counts what planned steps
will have done (`num_computed`, `num_pending`), and a page that it takes back is given out again only when
the steps in flight have retired.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from jaxserve.plan import EngineLimits, PageGrant, SamplingParams, StepShape
from jaxserve.scheduling.admission import check_params, check_pool, check_prompt
from jaxserve.scheduling.pages import PagePool, PageTable, SharedPrefix, max_pages_spanned
from jaxserve.scheduling.queue import WaitingQueue
from jaxserve.scheduling.request import Request, RequestState, Submission
from jaxserve.scheduling.step import ScheduledStep, StepBuilder


class Scheduler:
    """Owns the queue, the slots and the pages of one engine. Not safe for use from several threads."""

    def __init__(self, limits: EngineLimits, *, max_chunk: int | None = None) -> None:
        """`max_chunk`: the most prompt tokens in one step; by default as many as the largest shape holds.

        The rows of running requests count within it while they are few: see `_budget`.

        Raises ValueError if it is below 1 or above the largest shape.
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
        self._max_running = min(limits.num_slots, largest.rows, largest.sequences, largest.logit_rows)
        self._free_slots = list(range(self._max_running - 1, -1, -1))
        self._pool = PagePool(limits.num_pages)
        self._windowed = any(limits.windows)
        self._page_caps = _page_caps(limits, self.max_chunk)
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._prefixes: dict[Submission, SharedPrefix] = {}
        self._heirs_due: list[Submission] = []
        self._num_arrived = 0
        self._in_flight: list[ScheduledStep] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue; samples that wait for their prompt's first one are not in it yet."""
        return len(self._waiting)

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
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, seed: int
    ) -> Submission:
        """Queue the prompt's `n` requests. Raises ValueError as `check` does."""
        prompt = self.check(prompt_token_ids, params)
        eos_ids = frozenset[int]() if params.ignore_eos else frozenset(self.limits.eos_token_ids)
        submission = Submission(
            request_id,
            self._num_arrived,
            prompt,
            params,
            seed,
            self._max_tokens(prompt, params),
            eos_ids,
            frozenset(params.stop_token_ids),
        )
        self._num_arrived += 1
        for index in range(params.n):
            table = PageTable(self._pool, self.limits.page_size, self.limits.windows)
            submission.requests.append(Request(submission, index, (submission.arrival, index), table))
        submission.heirs.update(submission.requests[1:])
        self._waiting.push(submission.leader)
        if self._num_shareable(submission):
            submission.awaits_prefix = params.n > 1
        else:
            self._queue_heirs(submission)
        return submission

    def plan(self) -> ScheduledStep | None:
        """The next step, which the caller must dispatch, or None if nothing can be computed just now.

        None with no step in flight means that there is nothing to do at all.
        """
        step = StepBuilder(self.limits, self._budget(), self.max_chunk)
        if self._plan_running(step):
            self._admit(step)
        for submission in self._heirs_due:
            self._queue_heirs(submission)
        self._heirs_due.clear()
        scheduled = step.build()
        if scheduled is not None:
            self._pool.begin_step()
            self._in_flight.append(scheduled)
        elif not self._in_flight and (self._running or self._waiting):
            raise RuntimeError(
                f"no step can be planned for {len(self._running)} running and "
                f"{len(self._waiting)} waiting requests"
            )
        return scheduled

    def retire(self, step: ScheduledStep) -> None:
        """The oldest step in flight has been collected; pages that waited for it may be used again."""
        if not self._in_flight or self._in_flight[0] is not step:
            raise RuntimeError("steps retire in the order in which they were planned")
        self._in_flight.pop(0)
        self._pool.retire_step()

    def finish(self, request: Request, state: RequestState) -> None:
        """End a request, from whichever state, and take back what it holds."""
        running = request.state is RequestState.RUNNING
        request.advance(state)
        if running:
            self._leave_slot(request)
        elif request.queued:
            self._waiting.remove(request)
        self._drop_heir(request)

    def abandon_steps(self) -> None:
        """The device is lost: no step in flight will ever be collected."""
        while self._in_flight:
            self.retire(self._in_flight[0])

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pages, slots and queue account for one another.

        With nothing running this means that every page and slot is free, or held for waiting samples.
        """
        holders = [request.table.pages for request in self._running]
        self._pool.check_integrity([*holders, *(prefix.pages for prefix in self._prefixes.values())])
        slots = sorted(self._free_slots + [request.slot for request in self._running])
        if slots != list(range(self._max_running)):
            raise RuntimeError(f"slots {slots} are free or running, of {self._max_running}")
        orders = [request.order for request in self._running]
        if orders != sorted(set(orders)):
            raise RuntimeError(f"running requests are out of order: {orders}")
        if not self._running and not self._waiting and self._prefixes:
            raise RuntimeError(f"{len(self._prefixes)} shared prompts are held for nobody")

    def _max_tokens(self, prompt: list[int], params: SamplingParams) -> int:
        return min(params.max_tokens, self.limits.max_model_len - len(prompt))

    def _budget(self) -> StepShape:
        """The largest shape that the next step may take.

        A chunk and the running requests' rows together should fill the rung that the chunk alone would
        need, rather than spill a few rows into the next; unless that left less than half for the chunk.
        """
        num_running = len(self._running)
        for shape in self.limits.chunk_shapes:
            enough = min(shape.sequences, shape.logit_rows) >= num_running
            if enough and shape.rows >= max(self.max_chunk, 2 * num_running):
                return shape
        return self.limits.chunk_shapes[-1]

    # Running requests ------------------------------------------------------------------------------------

    def _plan_running(self, step: StepBuilder) -> bool:
        """Plan every running request; return whether all kept their pages, so that others may be admitted."""
        index = 0
        num_running = len(self._running)
        while index < len(self._running):  # Preemption shortens the list, from the end.
            request = self._running[index]
            index += 1
            step.num_reserved = len(self._running) - index
            if request.num_uncomputed:
                self._plan_request(request, step)
        step.num_reserved = 0
        return len(self._running) == num_running

    def _plan_request(self, request: Request, step: StepBuilder) -> None:
        table = request.table
        if self._windowed:
            table.pass_window(request.num_computed)
        available = table.num_tokens_available(request.num_computed)
        if available < 1:
            if not self._make_room(request):
                return
            available = table.num_tokens_available(request.num_computed)
        chunk = step.next_chunk(request, available)
        if chunk.num_tokens > 0:
            for group, index, page in table.grow(request.num_computed + chunk.num_tokens):
                step.grants.append(PageGrant(group, request.slot, index, page))
            step.add(request, chunk)
            self._share_prompt(request)

    def _make_room(self, request: Request) -> bool:
        """Whether a page is free in every group, after taking from others, latest first, what it takes."""
        while not self._pool.num_free_everywhere:
            if self._pool.returning:
                return False
            if self._drop_prefix():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        request.advance(RequestState.PREEMPTED)
        self._leave_slot(request)
        request.num_computed = 0
        self._waiting.push(request)

    def _leave_slot(self, request: Request) -> None:
        del self._running[bisect_left(self._running, request.order, key=_order)]
        self._free_slots.append(request.slot)
        request.slot = -1
        request.decode_plan = None
        request.table.clear()

    # Waiting requests ------------------------------------------------------------------------------------

    def _admit(self, step: StepBuilder) -> None:
        promised = self._promised() if self._free_slots and self._waiting else []
        while self._free_slots and not step.full:
            request = self._waiting.peek()
            # A token of a preempted request may be under way; its slot is filled when that is known.
            if request is None or request.num_pending or not self._has_room(request, promised):
                return
            self._start(request, step)
            for group, num_owed in enumerate(self._owed(request)):
                promised[group] += num_owed

    def _start(self, request: Request, step: StepBuilder) -> None:
        prefix = self._prefix_for(request)
        if prefix is not None:
            request.table.adopt(prefix)
            request.num_computed = prefix.num_tokens
        chunk = step.next_chunk(request, request.table.num_tokens_available(request.num_computed))
        request.table.grow(request.num_computed + chunk.num_tokens)
        self._waiting.remove(request)
        request.advance(RequestState.RUNNING)
        request.slot = self._free_slots.pop()
        request.num_admissions += 1
        insort(self._running, request, key=_order)
        step.load(request)
        step.add(request, chunk)
        self._drop_heir(request)
        self._share_prompt(request)

    def _has_room(self, request: Request, promised: list[int]) -> bool:
        """Whether the pool can take the request's known tokens beside what is `promised` to running ones."""
        while not self._fits(request, promised):
            if self._running or self._in_flight or not self._prefixes:
                return False
            # Nobody will give anything back: shared prompts must go, this request's own the last.
            self._release_prefix(min(self._prefixes, key=lambda owner: owner is request.submission))
        return True

    def _fits(self, request: Request, promised: list[int]) -> bool:
        prefix = self._prefix_for(request)
        num_shared = 0 if prefix is None else prefix.num_tokens // self.limits.page_size
        wanted = self._num_pages(request.num_known) - num_shared
        return all(
            min(wanted, cap) + promised[group] <= self._pool.num_free(group)
            for group, cap in enumerate(self._page_caps)
        )

    def _promised(self) -> list[int]:
        """Free pages of each group that the running requests have yet to take."""
        owed = [self._owed(request) for request in self._running]
        return [sum(column) for column in zip(*owed, strict=True)] if owed else [0] * len(self._page_caps)

    def _owed(self, request: Request) -> list[int]:
        """What a running request has yet to take for its known tokens, and a page more in each group.

        The one more keeps a newcomer from being preempted as soon as somebody fills a page.
        """
        missing = max(0, self._num_pages(request.num_known) - request.table.num_spanned)
        return [min(missing, cap) + 1 for cap in self._page_caps]

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)

    # Prompts shared by several samples -------------------------------------------------------------------

    def _prefix_for(self, request: Request) -> SharedPrefix | None:
        return self._prefixes.get(request.submission) if request.sample_index else None

    def _num_shareable(self, submission: Submission) -> int:
        """Full pages of the prompt, short of its last token, which every sample computes for its logits."""
        return (len(submission.prompt) - 1) // self.limits.page_size

    def _share_prompt(self, request: Request) -> None:
        """Once the first sample's steps cover the full prompt pages, hold them for the other samples."""
        submission = request.submission
        if request.sample_index or not submission.awaits_prefix:
            return
        num_pages = self._num_shareable(submission)
        if request.num_computed >= num_pages * self.limits.page_size:
            submission.awaits_prefix = False
            self._prefixes[submission] = request.table.share(num_pages)
            # From the next step on: within one step nobody reads what another writes.
            self._heirs_due.append(submission)

    def _queue_heirs(self, submission: Submission) -> None:
        for heir in submission.heirs:
            self._waiting.push(heir)

    def _drop_heir(self, request: Request) -> None:
        heirs = request.submission.heirs
        heirs.discard(request)
        if not heirs and request.submission in self._prefixes:
            self._release_prefix(request.submission)

    def _drop_prefix(self) -> bool:
        """Give up the latest shared prompt that nobody but its waiting samples holds, if there is one."""
        for submission in reversed(self._prefixes):
            pages = self._prefixes[submission].pages
            if any(page and self._pool.held_once(g, page) for g, held in enumerate(pages) for page in held):
                self._release_prefix(submission)
                return True
        return False

    def _release_prefix(self, submission: Submission) -> None:
        for group, pages in enumerate(self._prefixes.pop(submission).pages):
            for page in pages:
                if page:
                    self._pool.release(group, page)


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _page_caps(limits: EngineLimits, max_chunk: int) -> list[int]:
    """The most pages that a request holds in each group at once: behind a window they are given back."""
    caps: list[int] = []
    for window, num_pages in zip(limits.windows, limits.num_pages, strict=True):
        cap = num_pages - 1
        if window:
            cap = min(cap, max_pages_spanned(window + max_chunk, limits.page_size))
        caps.append(cap)
    return caps
