"""Lets waiting requests into slots: the most urgent first, each where there is room for it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request, RequestState
from jaxserve.scheduling.room import Room, Start
from jaxserve.scheduling.running_pages import RunningPages
from jaxserve.scheduling.shared_prompts import SharedPrompts
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.step import StepBuilder
from jaxserve.scheduling.step_budget import TokenBudget

Hurdle = Literal["slots", "pages", "tpot_target", "rows"]
HURDLES: tuple[Hurdle, ...] = ("slots", "pages", "tpot_target", "rows")
"""What keeps others waiting when a step is planned: all slots are taken; the pool has no room beside what is
promised; one answer more would miss a target for the time between tokens; the step has no rows left."""
_MAX_PASSED = 4
"""Waiting requests without room that a step's planning looks past."""


class Newcomers:
    """Starts requests of the queue within a step in the making."""

    def __init__(
        self,
        table: SlotTable,
        queue: RequestQueue,
        room: Room,
        pages: RunningPages,
        prompts: SharedPrompts,
        cache: PrefixCache | None,
        budget: TokenBudget,
    ) -> None:
        self._table = table
        self._queue = queue
        self._room = room
        self._pages = pages
        self._prompts = prompts
        self._cache = cache
        self._budget = budget
        self.num_recomputed = 0
        """Tokens that preempted requests had computed, and did not find again when they went on."""

    def make_way(self, now: float) -> None:
        """Preempt a less urgent request where all slots are taken and the next one's class has fewer than
        are reserved for it. Before a step has rows: it must have none of the victim's."""
        if self._table.has_free or not len(self._queue):
            return
        self._queue.begin_round()
        request = self._queue.peek(now)
        if request is None or not self._queue.below_floor(request):
            return
        victim = self._pages.victim()
        if self._queue.precedes(request, victim):
            self._pages.preempt(victim, now)

    def admit(self, step: StepBuilder, now: float, *, in_flight: bool) -> Hurdle | None:
        """Fill what is left of the step with waiting requests, the most urgent first.

        `in_flight`: whether steps are under way that may yet give something back. Returns what the rest of
        the queue waits for; None where that is only a token of its own that is under way, or nobody waits.
        """
        if not len(self._queue):
            return None
        if not self._table.has_free:
            return "slots"
        hurdle = self._fill(step, now, in_flight=in_flight)
        return hurdle if len(self._queue) else None

    def _fill(self, step: StepBuilder, now: float, *, in_flight: bool) -> Hurdle | None:
        self._queue.begin_round()
        promised: list[int] | None = None
        num_passed, short = 0, False
        while not step.full and (request := self._queue.peek(now)) is not None:
            if not self._has_slot(request):
                return "tpot_target" if self._table.has_free else "slots"
            promised = promised or self._room.promised()
            # A token of a preempted request may be under way; its slot is filled when that is known.
            ready = not (request.num_pending or request.held)
            idle = not (len(self._table) or in_flight)
            start = self._room.find(request, promised, idle=idle) if ready else None
            if start is not None:
                self._start(request, start, step)
                self._room.promise(request, promised)
            else:
                num_passed, short = num_passed + 1, short or ready
                if num_passed > _MAX_PASSED or not self._queue.set_aside(request, now):
                    break
        if step.full:
            if not self._table.has_free:
                return "slots"
            return "tpot_target" if step.paced else "rows"
        return "pages" if short else None

    def _has_slot(self, request: Request) -> bool:
        """Whether a slot is free in which neither it nor those that run would miss the tightest TPOT."""
        table = self._table
        if not (table.has_free and len(table)):
            return table.has_free
        tightest = float(table.tpot_target[table.order].min())
        tightest = min(tightest, self._queue.priority_class(request).tpot_target)
        return tightest == np.inf or len(table) < self._budget.max_decoding(tightest)

    def _start(self, request: Request, start: Start, step: StepBuilder) -> None:
        copies: list[tuple[int, int, int]] = []
        num_computed = 0
        if self._cache is not None:
            if start.prefix is not None and start.match is None:
                self._cache.start_shared(request)
            else:
                self._cache.start(request, start.match)
        if start.prefix is not None:
            copies, num_computed = request.table.adopt(start.prefix), start.prefix.num_tokens
        if self._cache is not None and start.beyond is not None:
            num_computed += self._cache.restore(request, start.beyond)
        if num_computed and not request.num_admissions and not request.sample_index:
            request.submission.num_cached = num_computed
        self.num_recomputed += max(0, request.num_lost - num_computed)
        request.num_lost = 0
        todo = request.num_known - num_computed
        chunk = step.next_chunk(request, num_computed, todo, request.table.num_tokens_available(num_computed))
        request.table.grow(num_computed + chunk.num_tokens)
        account = self._queue.start(request, num_computed)
        request.advance(RequestState.RUNNING)
        request.num_admissions += 1
        self._table.enter(request, num_computed, account, self._queue.priority_class(request))
        self._table.prepaid[request.slot] = len(request.submission.prompt) + self._queue.prepay(request)
        step.load(request, num_computed, copies)
        step.add(request, chunk, todo)
        self._prompts.drop_heir(request)
