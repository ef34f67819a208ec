"""Lets waiting requests into slots: the most urgent first, each where there is room for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from jaxserve.scheduling.prefix_caches import PrefixCaches
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.replica import Replica
from jaxserve.scheduling.request import Prefilled, Request, RequestState
from jaxserve.scheduling.room import Start
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.step import StepBuilder
from jaxserve.scheduling.step_budget import TokenBudget

Hurdle = Literal["slots", "pages", "tpot_target", "rows"]
HURDLES: tuple[Hurdle, ...] = ("slots", "pages", "tpot_target", "rows")
"""What keeps others waiting when a step is planned: all slots are taken; the pool has no room beside what is
promised; one answer more would miss a target for the time between tokens; the step has no rows left."""
_MAX_PASSED = 4
"""Waiting requests without room that a step's planning looks past."""
_MOST_AHEAD = (2, 4)
"""A replica in which more run than so many times those of the emptiest, and so many, is not chosen for the
texts that it has."""


class Newcomers:
    """Starts requests of the queue within a step in the making."""

    def __init__(
        self,
        table: SlotTable,
        queue: RequestQueue,
        replicas: Sequence[Replica],
        cache: PrefixCaches | None,
        budget: TokenBudget,
    ) -> None:
        """`cache`: those of the replicas."""
        self._table = table
        self._queue = queue
        self._replicas = replicas
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
        computed = self._table.computed
        victim, pages = min(
            ((replica.pages.victim(), replica.pages) for replica in self._replicas),
            key=lambda one: self._queue.victim_key(one[0], int(computed[one[0].slot])),
        )
        if self._queue.precedes(request, victim):
            pages.preempt(victim, now)

    def admit(self, steps: Mapping[int, StepBuilder], now: float, in_flight: Sequence[bool]) -> Hurdle | None:
        """Fill what is left of the step with waiting requests, the most urgent first.

        Args:
            steps: the parts, by replica, to which requests may come.
            now: seconds on the loop's clock.
            in_flight: of each replica, whether steps are under way that may yet give something back.

        Returns what the rest of the queue waits for; None where that is only a token of its own that is under
        way, or nobody waits.
        """
        if not len(self._queue):
            return None
        if not self._table.has_free:
            return "slots"
        hurdle = self._fill(steps, now, in_flight)
        return hurdle if len(self._queue) else None

    def _fill(self, steps: Mapping[int, StepBuilder], now: float, in_flight: Sequence[bool]) -> Hurdle | None:
        self._queue.begin_round()
        promised: dict[int, list[int]] = {}
        num_passed, short = 0, False
        while (open_to := [number for number, step in steps.items() if not step.full]) and (
            request := self._queue.peek(now)
        ) is not None:
            places = [self._replicas[number] for number in open_to if self._has_slot(request, number)]
            if not places:
                return "tpot_target" if self._table.has_free else "slots"
            for place in places:
                if place.number not in promised:
                    promised[place.number] = place.room.promised()
            # A token of a preempted request may be under way; its slot is filled when that is known.
            ready = not (request.num_pending or request.held)
            if not (ready and self._try(request, places, steps, promised, in_flight)):
                num_passed, short = num_passed + 1, short or ready
                if num_passed > _MAX_PASSED or not self._queue.set_aside(request, now):
                    break
        if not open_to:
            if not self._table.has_free:
                return "slots"
            return "tpot_target" if any(step.paced for step in steps.values()) else "rows"
        return "pages" if short else None

    def _try(
        self,
        request: Request,
        places: list[Replica],
        steps: Mapping[int, StepBuilder],
        promised: dict[int, list[int]],
        in_flight: Sequence[bool],
    ) -> bool:
        """Start the request in the first of the replicas with room for it, the best ones first."""
        if len(places) > 1:
            places.sort(key=lambda place: self._worth(request, place, promised[place.number]), reverse=True)
        for place in places:
            idle = not (self._table.num_taken_in(place.number) or in_flight[place.number])
            start = place.room.find(request, promised[place.number], idle=idle)
            if start is not None:
                self._start(request, place, start, steps[place.number])
                place.room.promise(request, promised[place.number])
                return True
        return False

    def _worth(self, request: Request, place: Replica, promised: list[int]) -> tuple[int, int, int]:
        """How good a replica is for a request: for what it has of its text, unless far more run there than
        elsewhere, then for having few who run, and last for its pages."""
        num_running = self._table.num_taken_in(place.number)
        fewest = min(self._table.num_taken_in(replica.number) for replica in self._replicas)
        num_cached = 0
        if num_running <= _MOST_AHEAD[0] * fewest + _MOST_AHEAD[1]:
            shared = place.prompts.find(request)
            if shared is not None:
                num_cached = shared.num_tokens
            elif place.cache is not None:
                num_cached = place.cache.num_cached(request)
        return num_cached, -num_running, place.room.num_unpromised(promised)

    def _has_slot(self, request: Request, replica: int) -> bool:
        """Whether a slot of a replica is free in which neither it nor those that run would miss the tightest
        TPOT."""
        table = self._table
        has_free, num_taken = table.has_free_in(replica), table.num_taken_in(replica)
        if not (has_free and num_taken):
            return has_free
        tightest = float(table.tpot_target[table.order].min())
        tightest = min(tightest, self._queue.priority_class(request).tpot_target)
        return tightest == np.inf or num_taken < self._budget.max_decoding(tightest)

    def _start(self, request: Request, place: Replica, start: Start, step: StepBuilder) -> None:
        copies: list[tuple[int, int, int]] = []
        num_computed = 0
        request.table.move_to(place.pool)
        if place.cache is not None:
            if start.prefix is not None and start.match is None:
                place.cache.start_shared(request)
            else:
                place.cache.start(request, start.match)
        if start.prefix is not None:
            copies, num_computed = request.table.adopt(start.prefix), start.prefix.num_tokens
        if place.cache is not None and start.beyond is not None:
            num_computed += place.cache.restore(request, start.beyond)
        num_cached = num_computed
        if request.prefilled is not None and request.prefilled.num_tokens > num_computed:
            num_computed = self._take_prefilled(request, request.prefilled)
            num_cached = max(num_cached, request.prefilled.num_cached)
        if num_cached and not request.num_admissions and not request.sample_index:
            request.submission.num_cached = num_cached
        self.num_recomputed += max(0, request.num_lost - num_computed)
        request.num_lost = 0
        todo = request.num_known - num_computed
        chunk = step.next_chunk(request, num_computed, todo, request.table.num_tokens_available(num_computed))
        request.table.grow(num_computed + chunk.num_tokens)
        account = self._queue.start(request, num_computed)
        request.advance(RequestState.RUNNING)
        request.num_admissions += 1
        entitled = self._queue.priority_class(request)
        self._table.enter(request, place.number, num_computed, account, entitled)
        self._table.prepaid[request.slot] = len(request.submission.prompt) + self._queue.prepay(request)
        step.load(request, num_computed, copies)
        step.add(request, chunk, todo)
        for replica in self._replicas:
            replica.prompts.drop_heir(request)
        if self._cache is not None and len(self._replicas) > 1:
            self._cache.forget(request)  # Others have been asked for its text too.

    def _take_prefilled(self, request: Request, prefilled: Prefilled) -> int:
        """Give a request pages for what has been computed elsewhere of its text, after those that it shares;
        return the tokens that are computed then."""
        first = request.table.num_spanned
        request.table.take_computed(prefilled.num_tokens)
        prefilled.wanted = range(first, request.table.num_spanned)
        return prefilled.num_tokens
