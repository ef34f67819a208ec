"""Whether the pool has room for one more request beside what the running ones have yet to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.plan import EngineLimits
from jaxserve.scheduling.offload import OffloadMatch
from jaxserve.scheduling.pages import PagePool, SharedPrefix, max_pages_spanned
from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.prefix_tree_match import PrefixMatch
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.shared_prompts import SharedPrompts
from jaxserve.scheduling.slots import SlotTable


class Start(NamedTuple):
    """What a request can start on; there is room for the rest."""

    prefix: SharedPrefix | None
    match: PrefixMatch | None
    """Where the prefix was found, unless it is a prompt that samples share."""
    beyond: OffloadMatch | None = None
    """Pages after the prefix that are to be brought back into the pool."""


class Room:
    """Counts a replica's free pages, and those that can be had by forgetting, against promised ones, in each
    group."""

    def __init__(
        self,
        limits: EngineLimits,
        max_chunk: int,
        pool: PagePool,
        table: SlotTable,
        prompts: SharedPrompts,
        cache: PrefixCache | None,
        queue: RequestQueue,
        replica: int = 0,
    ) -> None:
        """`pool`, `prompts` and `cache` are those of the replica."""
        self._replica = replica
        self._queue = queue
        self._ahead = queue.policy.pages_ahead
        self._page_size = limits.page_size
        self._pool = pool
        self._table = table
        self._prompts = prompts
        self._cache = cache
        self._caps = _page_caps(limits, max_chunk)

    def find(self, request: Request, promised: list[int], *, idle: bool) -> Start | None:
        """How the request can start, if the pool has room for it beside what is `promised`.

        If `idle`, nobody will give anything back: no room is kept for its answer, shared prompts then go,
        this request's own the last, and in the end what it could start on, if that is itself in the way.
        """
        num_tokens = request.num_known
        if not idle:
            num_tokens += int(
                self._ahead * max(0, self._queue.expected_output(request) - len(request.output))
            )
        while (start := self._fit(request, num_tokens, promised)) is None and idle and len(self._prompts):
            self._prompts.release_any(last=request.submission)
        return self._fit(request, num_tokens, promised, cold=True) if start is None and idle else start

    def promised(self) -> list[int]:
        """Free pages of each group that the running requests have yet to take.

        For its known tokens, some of those that are expected, and a page more: that keeps a newcomer from
        being preempted as soon as somebody fills a page.
        """
        table, taken = self._table, self._table.order_in(self._replica)
        known = table.known[taken]
        ahead = np.maximum(table.prepaid[taken] - known, 0) * self._ahead
        num_tokens = known + ahead.astype(np.int32)
        missing = -(-num_tokens // self._page_size) - table.capacity[taken] // self._page_size
        missing = np.maximum(missing, 0)
        return [int(np.minimum(missing, cap).sum()) + len(taken) for cap in self._caps]

    def would_hold(self, lengths: Sequence[int]) -> bool:
        """Whether requests of so many known tokens each would fit beside what is promised, in pages that are
        free or can be had."""
        promised = self.promised()
        for group, cap in enumerate(self._caps):
            evictable = 0 if self._cache is None else self._cache.num_evictable(group)
            needed = promised[group] + sum(min(self._num_pages(length), cap) + 1 for length in lengths)
            if needed > self._pool.num_free(group) + evictable:
                return False
        return True

    def num_unpromised(self, promised: list[int]) -> int:
        """Pages, of the group that has fewest, that are free or can be had and that nobody waits for."""
        evictable = [0 if self._cache is None else self._cache.num_evictable(g) for g in range(len(promised))]
        return min(self._pool.num_free(group) + evictable[group] - num for group, num in enumerate(promised))

    def promise(self, request: Request, promised: list[int]) -> None:
        """Count what a request that has just started has yet to take."""
        ahead = int(self._ahead * max(0, int(self._table.prepaid[request.slot]) - request.num_known))
        missing = max(0, self._num_pages(request.num_known + ahead) - request.table.num_spanned)
        for group, cap in enumerate(self._caps):
            promised[group] += min(missing, cap) + 1

    def _fit(
        self, request: Request, num_tokens: int, promised: list[int], *, cold: bool = False
    ) -> Start | None:
        """How the request can start with room for its first `num_tokens`; `cold`: on nothing."""
        while True:
            start = Start(None, None) if cold else self._look_up(request)
            needed = self._needed(num_tokens, start, promised)
            if self._cover(needed):
                return start
            if self._cache is None or not self._could_cover(needed, start.match):
                return None
            # Then look again: part of a page may have been forgotten of what was found.
            if not self._cache.free(needed, keep=start.match):
                return None

    def _look_up(self, request: Request) -> Start:
        prefix = self._prompts.find(request)
        if prefix is not None or self._cache is None:
            return Start(prefix, None)
        if request.prefilled is not None and request.prefilled.num_tokens:
            match = self._cache.match_full(request)  # What is moved comes in whole pages after these.
            return Start(None if match is None else self._cache.prefix(match), match)
        beyond = self._cache.match_beyond(request)
        if beyond is not None:
            match, more = beyond
            return Start(self._cache.prefix(match) if match.num_tokens else None, match, more)
        match = self._cache.match(request)
        return Start(None if match is None else self._cache.prefix(match), match)

    def _needed(self, num_tokens: int, start: Start, promised: list[int]) -> list[int]:
        num_shared = 0 if start.prefix is None else start.prefix.num_full
        num_new = self._num_pages(num_tokens) - num_shared
        return [min(num_new, cap) + promised[group] for group, cap in enumerate(self._caps)]

    def _could_cover(self, needed: list[int], match: PrefixMatch | None) -> bool:
        assert self._cache is not None, "there is nothing to forget"
        claimed = (0,) * len(needed) if match is None else self._cache.num_claimed(match)
        return all(
            num <= self._pool.num_free(group) + self._cache.num_evictable(group) - claimed[group]
            for group, num in enumerate(needed)
        )

    def _cover(self, needed: list[int]) -> bool:
        return all(num <= self._pool.num_free(group) for group, num in enumerate(needed))

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)


def _page_caps(limits: EngineLimits, max_chunk: int) -> list[int]:
    """The most pages that a request holds in each group at once: behind a window they are given back."""
    caps: list[int] = []
    for window, num_pages in zip(limits.windows, limits.num_pages, strict=True):
        cap = num_pages - 1
        if window:
            num_tokens = window + limits.longest_lag + max_chunk
            cap = min(cap, max_pages_spanned(num_tokens, limits.page_size))
        caps.append(cap)
    return caps
