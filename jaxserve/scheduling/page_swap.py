"""Pages beyond the pool as the scheduler uses them: what is worth keeping, and what is worth fetching."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.scheduling.offload import Offload, OffloadMatch
from jaxserve.scheduling.offload_cost import TransferRates, choose
from jaxserve.scheduling.pages import PageTable
from jaxserve.scheduling.prefix_tree import TreeCursor
from jaxserve.scheduling.prefix_tree_match import PrefixMatch

_MAX_WRITING = 64
"""Pages on their way out at once: each is a copy that somebody has to find memory for."""
_WHILE_BUSY, _WHILE_IDLE = 4, 32
"""Pages of text that are written early beside a step, and while there is none."""


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """Totals since the start, in pages of text except where groups are counted apart."""

    saved_pages: int = 0
    """Pages that preempted requests had written."""
    restored_pages: int = 0
    """Pages that were brought back and used."""
    damaged_pages: int = 0
    """Pages of single groups that did not come back as they were written."""


class PageSwap:
    """Decides by measured cost which pages move. Not safe for use from several threads."""

    def __init__(
        self, offload: Offload, rates: TransferRates, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`rates`: what transfers take; bringing pages back is measured further on. `clock`: in seconds."""
        self.offload = offload
        self._rates = rates
        self._clock = clock
        self._num_saved = 0
        self._num_restored = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and nothing is left to be written early."""
        return not (self.offload.num_unwritten or self.offload.num_writing)

    @property
    def statistics(self) -> SwapStatistics:
        num_damaged = sum(index.num_damaged for index in self.offload.indices)
        return SwapStatistics(self._num_saved, self._num_restored, num_damaged)

    def work(self, *, busy: bool) -> None:
        """Keep what has arrived, and start to write more; to be called after a step's dispatch.

        `busy`: whether a step is under way, which has the device first.
        """
        self.offload.collect(wait=not busy)
        self.offload.write_early(min(self._room, _WHILE_BUSY if busy else _WHILE_IDLE))

    def save(self, cursor: TreeCursor, recompute_seconds: float) -> None:
        """A request is to give up its pages: write what is not written yet, if that costs less than to
        compute its text again."""
        bytes_out = self.offload.bytes_to_save(cursor)
        if (
            bytes_out
            and self._room
            and self._pays(recompute_seconds, bytes_out, self.offload.num_bytes(cursor))
        ):
            self._num_saved += self.offload.save(cursor, self._room)

    def find(self, found: PrefixMatch, recompute_seconds: Callable[[int], float]) -> OffloadMatch | None:
        """Pages after those in the tree that are kept and cheaper to fetch than to compute.

        `recompute_seconds`: to compute so many pages after those that were found.
        """
        match = self.offload.match(found)
        if match.num_pages and self._pays(recompute_seconds(match.num_pages), 0, match.num_bytes):
            return match
        return None

    def restore(self, match: OffloadMatch, table: PageTable) -> int:
        """Bring pages back for a request whose table holds those before; return how many of them came.

        The table spans these then. They have to be free, and the match from the same step's planning.
        """
        started = self._clock()

        def grow(num_pages: int) -> list[list[int]]:
            table.take_computed((match.first_page + num_pages) * self.offload.page_size)
            return table.pages

        num_pages = self.offload.restore(self.offload.begin(match), grow)
        self._rates.back.observe(match.num_bytes, self._clock() - started)
        self._num_restored += num_pages
        return num_pages

    @property
    def _room(self) -> int:
        """Pages that may be started on their way out."""
        return max(0, _MAX_WRITING - self.offload.num_writing)

    def _pays(self, recompute_seconds: float, bytes_out: int, bytes_back: int) -> bool:
        way = choose(
            self._rates, recompute_seconds=recompute_seconds, bytes_out=bytes_out, bytes_back=bytes_back
        )
        return way == "swap"
