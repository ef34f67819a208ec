"""Whether the pool has room for one more request beside what the running ones have yet to take."""

from __future__ import annotations

import numpy as np

from jaxserve.plan import EngineLimits
from jaxserve.scheduling.pages import PagePool, max_pages_spanned
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.shared_prompts import SharedPrompts
from jaxserve.scheduling.slots import SlotTable


class Room:
    """Counts free pages against promised ones, in each cache group."""

    def __init__(
        self, limits: EngineLimits, max_chunk: int, pool: PagePool, table: SlotTable, prompts: SharedPrompts
    ) -> None:
        self._page_size = limits.page_size
        self._pool = pool
        self._table = table
        self._prompts = prompts
        self._caps = _page_caps(limits, max_chunk)

    def find(self, request: Request, promised: list[int], *, idle: bool) -> bool:
        """Whether the pool can take the request's known tokens beside what is `promised` to running ones.

        If `idle`, nobody will give anything back: shared prompts then go, this request's own the last.
        """
        while not self._fits(request, promised):
            if not (idle and len(self._prompts)):
                return False
            self._prompts.release_any(last=request.submission)
        return True

    def promised(self) -> list[int]:
        """Free pages of each group that the running requests have yet to take.

        For its known tokens, and a page more: that keeps a newcomer from being preempted as soon as
        somebody fills a page.
        """
        table, taken = self._table, self._table.order
        missing = -(-table.known[taken] // self._page_size) - table.capacity[taken] // self._page_size
        missing = np.maximum(missing, 0)
        return [int(np.minimum(missing, cap).sum()) + len(taken) for cap in self._caps]

    def promise(self, request: Request, promised: list[int]) -> None:
        """Count what a request that has just started has yet to take."""
        missing = max(0, self._num_pages(request.num_known) - request.table.num_spanned)
        for group, cap in enumerate(self._caps):
            promised[group] += min(missing, cap) + 1

    def _fits(self, request: Request, promised: list[int]) -> bool:
        prefix = self._prompts.find(request)
        wanted = self._num_pages(request.num_known) - (0 if prefix is None else prefix.num_full)
        return all(
            min(wanted, cap) + promised[group] <= self._pool.num_free(group)
            for group, cap in enumerate(self._caps)
        )

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)


def _page_caps(limits: EngineLimits, max_chunk: int) -> list[int]:
    """The most pages that a request holds in each group at once: behind a window they are given back."""
    caps: list[int] = []
    for window, num_pages in zip(limits.windows, limits.num_pages, strict=True):
        cap = num_pages - 1
        if window:
            cap = min(cap, max_pages_spanned(window + max_chunk, limits.page_size))
        caps.append(cap)
    return caps
