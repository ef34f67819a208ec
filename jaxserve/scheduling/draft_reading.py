"""How far the engine's draft model has read each running text, and what it reads next.

It reads along only where drafts are verified. What steps without drafts have computed, prompts for the most
part, it reads before a sequence drafts again, and so nothing at all while drafting rests. What it has read of
a page stays true of it until the page is given to somebody else: whoever starts on the same pages reads on
from there.
"""

from __future__ import annotations

import numpy as np

from jaxserve.plan import EngineLimits, IntArray
from jaxserve.scheduling.pages import PagePool
from jaxserve.scheduling.slots import BoolArray, SlotTable

LONGEST_TAIL = 1
"""Unread tokens that are read one by one as drafts are made: a wholly accepted draft leaves one."""


class DraftReading:
    """Follows the draft model of an engine whose limits have `draft_reads`."""

    def __init__(self, limits: EngineLimits, table: SlotTable, pool: PagePool) -> None:
        self._limits = limits
        self._table = table
        self._pool = pool
        self._group = limits.windows.index(0)
        self._read = np.zeros(table.num_slots, np.int32)
        """Tokens of each slot that have been read; counts where the slot's admission is the one below."""
        self._serial = np.full(table.num_slots, -1, np.int64)
        num_pages = limits.num_pages[self._group]
        self._page_read = np.zeros(num_pages, np.int32)
        """Tokens of each page that have been read; counts where the page's use is the one below."""
        self._page_use = np.full(num_pages, -1, np.int64)
        self._unsettled: IntArray | None = None
        """Slots whose drafts have been read and may turn out wrong."""

    def settle(self) -> None:
        """The step planned last has been committed: what was read of wrong drafts does not count."""
        if self._unsettled is None:
            return
        slots, self._unsettled = self._unsettled, None
        slots = slots[self._table.serial[slots] == self._serial[slots]]
        before = self._read[slots]
        self._read[slots] = np.minimum(before, self._table.computed[slots])
        self._mark(slots)

    def read_on(self, slots: IntArray, wanted: BoolArray) -> IntArray | None:
        """Have slots read what they have not, those that `wanted` says, in their order, as far as one reading
        goes; return it as in `StepPlan.reads`."""
        self._follow(slots)
        unread = np.where(wanted, self._table.computed[slots] - self._read[slots], 0)
        unread[unread <= LONGEST_TAIL] = 0
        left = self._limits.draft_reads - np.cumsum(unread) + unread
        counts = np.clip(unread, 0, np.maximum(left, 0))
        if not counts.any():
            return None
        reading = counts.nonzero()[0]
        chosen, counts = slots[reading], counts[reading]
        reads = np.stack([chosen, self._read[chosen], counts], axis=1).astype(np.int32)
        self._read[chosen] += counts
        self._mark(chosen)
        return reads

    def unread(self, slots: IntArray) -> IntArray:
        """[S] as in `StepPlan.unread`: -1 where more is unread than is read with drafts."""
        self._follow(slots)
        unread = self._table.computed[slots] - self._read[slots]
        return np.where(unread <= LONGEST_TAIL, unread, -1).astype(np.int32)

    def read_drafts(self, slots: IntArray, unread: IntArray, num_drafts: IntArray) -> None:
        """A step reads these with its drafts: the last known token of each slot, and all drafts but the last.

        Called before the table counts the step; `settle` follows when it has been committed.
        """
        along = unread >= 0
        self._read[slots[along]] = (self._table.computed[slots] + np.maximum(num_drafts, 1))[along]
        self._unsettled = slots[along]

    def _follow(self, slots: IntArray) -> None:
        """Find out what has been read of those that have come to their slots since."""
        table = self._table
        for slot in slots[table.serial[slots] != self._serial[slots]].tolist():
            self._serial[slot] = table.serial[slot]
            self._read[slot] = min(self._num_read_before(slot), int(table.computed[slot]))

    def _num_read_before(self, slot: int) -> int:
        """Tokens that others have read on the pages that the slot began with."""
        num_read, page_size = 0, self._limits.page_size
        for page in self._table.at(slot).table.pages[self._group]:
            if self._page_use[page] != self._pool.num_uses(self._group, page):
                return num_read
            num_read += int(self._page_read[page])
            if self._page_read[page] < page_size:
                return num_read
        return num_read

    def _mark(self, slots: IntArray) -> None:
        """Write down how much of each page of the slots has been read, from the last full one on."""
        page_size = self._limits.page_size
        for slot in slots.tolist():
            num_read, pages = int(self._read[slot]), self._table.at(slot).table.pages[self._group]
            for index in range(min(-(-num_read // page_size), len(pages)) - 1, -1, -1):
                page = pages[index]
                use = self._pool.num_uses(self._group, page)
                if self._page_use[page] == use and self._page_read[page] == page_size:
                    break
                self._page_use[page] = use
                self._page_read[page] = min(num_read - index * page_size, page_size)
