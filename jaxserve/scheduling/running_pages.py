"""Gives running requests their pages, and takes them back when others need them more."""

from __future__ import annotations

import numpy as np

from jaxserve.plan import EngineLimits, IntArray
from jaxserve.scheduling.pages import PagePool
from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request, RequestState
from jaxserve.scheduling.shared_prompts import SharedPrompts
from jaxserve.scheduling.slots import SlotTable


class RunningPages:
    """The pages of the requests in a replica's slots. A preempted one goes back to the queue."""

    def __init__(
        self,
        pool: PagePool,
        limits: EngineLimits,
        table: SlotTable,
        queue: RequestQueue,
        prompts: SharedPrompts,
        cache: PrefixCache | None,
        replica: int = 0,
    ) -> None:
        """`pool`, `prompts` and `cache` are those of the replica."""
        self._replica = replica
        self._pool = pool
        self._page_size = limits.page_size
        self._longest_lag = limits.longest_lag
        self._table = table
        self._queue = queue
        self._prompts = prompts
        self._cache = cache
        self.grants: dict[int, list[tuple[int, int, int, int]]] = {}
        """What running requests have been given that no step has told the device yet, by slot: (group, slot,
        index, page). Where groups decode in turn, a step may leave out requests that it found pages for."""
        self.num_preemptions = 0

    def find(self, decoding: IntArray, now: float) -> IntArray:
        """Those of the slots that have a page for their next token, after preempting others if need be."""
        table = self._table
        passing, short = table.computed >= table.next_pass, table.computed >= table.capacity
        if not (passing | short)[decoding].any():
            return decoding
        to_pass: list[int] = decoding[passing[decoding]].tolist()
        for slot in to_pass:
            self.pass_window(table.at(slot))
        to_grow: list[int] = decoding[short[decoding]].tolist()
        if len(to_grow) <= self._pool.num_free_everywhere:
            for slot in to_grow:
                self.grow(table.at(slot), int(table.computed[slot]) + 1)
            return decoding
        held_up: list[int] = []
        for slot in to_grow:
            request = table.requests[slot]
            if request is not None:
                if self.make_room(request, now):
                    self.grow(request, int(table.computed[slot]) + 1)
                else:
                    held_up.append(slot)
        keep = table.serial[decoding] >= 0
        if held_up:
            keep &= ~np.isin(decoding, held_up)
        return decoding if keep.all() else decoding[keep]

    def can_lend(self, decoding: IntArray, num_ahead: IntArray) -> bool:
        """Whether pages for so many more tokens of those that decode would take nobody's."""
        table, page_size = self._table, self._page_size
        wanted = -(-(table.computed[decoding] + num_ahead) // page_size)
        missing = int(np.maximum(0, wanted - table.capacity[decoding] // page_size).sum())
        if missing:
            self.make_free(2 * missing)
        # As many again are left for the step after this one.
        return 2 * missing <= self._pool.num_free_everywhere

    def lend(self, decoding: IntArray, num_ahead: IntArray) -> None:
        """Give those that decode pages for so many more tokens each, which `can_lend` has found."""
        table = self._table
        wanted = table.computed[decoding] + num_ahead
        short = wanted > table.capacity[decoding]
        for slot, num_tokens in zip(decoding[short].tolist(), wanted[short].tolist(), strict=True):
            self.grow(table.at(slot), num_tokens)

    def take_grants(self, slots: IntArray | None = None) -> list[tuple[int, int, int, int]]:
        """What the step in the making tells the device of: the grants of these slots, or of all."""
        told = list(self.grants) if slots is None else slots.tolist()
        return [grant for slot in told for grant in self.grants.pop(slot, ())]

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give a request pages for its first `num_tokens` tokens; they must be free."""
        grown = request.table.grow(num_tokens)
        if grown:
            slot = request.slot
            granted = self.grants.setdefault(slot, [])
            for group, index, page in grown:
                granted.append((group, slot, index, page))
            self._table.follow_growth(request)

    def pass_window(self, request: Request) -> None:
        """Give back what lies behind the windows of the request's next token; full pages go to the cache
        before that."""
        if self._cache is not None:
            self._cache.store_rest(self._table, request)
        position = int(self._table.computed[request.slot]) - self._longest_lag
        request.table.pass_window(max(0, position))
        self._table.follow_pages(request)

    def make_free(self, num_pages: int) -> None:
        """Have so many pages free in every group, as far as forgetting helps."""
        if self._cache is not None:
            self._cache.free([num_pages] * len(self._pool.num_pages))

    def make_room(self, request: Request, now: float) -> bool:
        """Whether a page is free in every group, after taking from others what it takes."""
        while not self._pool.num_free_everywhere:
            self.make_free(1)
            if self._pool.num_free_everywhere:
                break
            if self._pool.returning:
                return False
            if self._prompts.release_latest():
                continue
            victim = self.victim()
            self.preempt(victim, now)
            if victim is request:
                return False
        return True

    def victim(self) -> Request:
        """The running request of the replica whose preemption costs least; there must be one."""
        computed = self._table.computed
        return min(
            self._table.running_in(self._replica),
            key=lambda request: self._queue.victim_key(request, int(computed[request.slot])),
        )

    def preempt(self, request: Request, now: float) -> None:
        """Take a request's slot and pages, and let it wait."""
        request.advance(RequestState.PREEMPTED)
        request.num_lost = int(self._table.computed[request.slot])
        self.take_back(request, returns=True)
        self.num_preemptions += 1
        self._queue.push(request, now)

    def take_back(self, request: Request, *, returns: bool = False) -> None:
        """A request leaves its slot; `returns`: to have another one later."""
        if self._cache is not None:
            self._cache.store_rest(self._table, request)
            if returns:
                self._cache.save(request)
        self.grants.pop(request.slot, None)
        self._table.leave(request)
        self._queue.leave(request)
        request.table.clear()
        if self._cache is not None:
            self._cache.end(request)
