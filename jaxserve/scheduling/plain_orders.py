"""The orders that ours is compared with: first come first served, and longest cached prefix first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from jaxserve.scheduling.request import Request
from jaxserve.scheduling.waiting import Entry, EntryHeap

PrefixScore = Callable[[Request], int]
"""Tokens of a request's known ones that the prefix cache holds at present."""
_WINDOW = 128
"""Earliest requests among which the longest prefix is looked for: each look costs a walk of the cache."""


class _PlainOrder:
    """What an order without classes and tenants need not know."""

    def enter(self, entry: Entry) -> None: ...

    def exit(self, entry: Entry) -> None: ...

    def serve(self, entry: Entry) -> None: ...


class FirstComeOrder(_PlainOrder):
    """By arrival, whatever the class, tenant or deadline, and whatever brings a request back."""

    def __init__(self) -> None:
        self._entries = EntryHeap()

    def show(self, entry: Entry) -> None:
        self._entries.push(entry.request.order, entry)

    def hide(self, entry: Entry) -> None:
        del entry  # It is dead already.
        self._entries.bury()

    def pick(self, now: float) -> Entry | None:
        del now
        return self._entries.peek()


class LongestPrefixOrder(_PlainOrder):
    """Preempted requests by arrival, then whichever of the earliest has most of its tokens cached.

    It serves whom the cache favours, and can starve the others. A pick costs one score for each of up to
    128 requests; the rest costs a move within an array.
    """

    def __init__(self, score: PrefixScore) -> None:
        self._score = score
        self._entries: list[Entry] = []

    def show(self, entry: Entry) -> None:
        insort(self._entries, entry, key=_place)

    def hide(self, entry: Entry) -> None:
        del self._entries[bisect_left(self._entries, _place(entry), key=_place)]

    def pick(self, now: float) -> Entry | None:
        del now
        window = self._entries[:_WINDOW]
        if not window or window[0].returns:
            return window[0] if window else None
        return max(window, key=lambda entry: self._score(entry.request))  # The earliest of the best.


def _place(entry: Entry) -> tuple[bool, tuple[int, int]]:
    return not entry.returns, entry.request.order
