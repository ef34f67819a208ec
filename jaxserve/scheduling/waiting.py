"""Waiting requests as the queue keeps them, and heaps from whose middle they may leave."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from jaxserve.scheduling.request import Request


@dataclass(slots=True, eq=False)
class Entry:
    """One stay of a request in the queue."""

    request: Request
    class_index: int
    account: int
    deadline: float
    """Seconds on the loop's clock; infinite without one."""
    due: float
    """When it will have waited longer than its class allows."""
    returns: bool
    """Whether it was preempted, and goes ahead of the new ones of its class."""
    live: bool = True
    """Whether it may be chosen."""
    num_passed: int = 0
    """Requests that have started ahead of it while it was next."""

    @property
    def urgency(self) -> tuple[float, tuple[int, int]]:
        """Earliest deadline first, then by arrival."""
        return self.deadline, self.request.order


class EntryHeap:
    """Entries by key. Dead ones stay until they surface, or until they are the majority.

    Every operation costs at most the logarithm of the length, amortised. Only a dead entry may have the
    key of a live one, as when a request comes back.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Entry]] = []
        self._num_dead = 0
        self._num_pushed = 0

    def push(self, key: Any, entry: Entry) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (key, self._num_pushed, entry))

    def peek(self) -> Entry | None:
        """The live entry with the lowest key, or None."""
        heap = self._heap
        while heap:
            entry = heap[0][2]
            if entry.live:
                return entry
            heapq.heappop(heap)
            self._num_dead -= 1
        return None

    def bury(self) -> None:
        """One of the entries has died."""
        self._num_dead += 1
        if 2 * self._num_dead > len(self._heap) + 16:
            self._heap = [item for item in self._heap if item[2].live]
            heapq.heapify(self._heap)
            self._num_dead = 0
