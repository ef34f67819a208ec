"""The waiting queue: first come, first served, whatever brings a request back into it."""

from __future__ import annotations

import heapq

from jaxserve.scheduling.request import Request


class WaitingQueue:
    """Requests by order of arrival. Every operation costs at most the logarithm of the length, amortised.

    An entry removed from the middle stays until it surfaces, or until such entries are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, request: Request) -> None:
        request.queued = True
        self._num_live += 1
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The earliest request, or None."""
        while self._heap and not self._heap[0][1].queued:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, request: Request) -> None:
        """Take a queued request out, wherever it stands."""
        assert request.queued, "the request is not in the queue"
        request.queued = False
        self._num_live -= 1
        if self._heap[0][1] is request:
            heapq.heappop(self._heap)  # An admitted request may come back, and must not be there twice.
        if len(self._heap) > 2 * self._num_live + 16:
            self._heap = [entry for entry in self._heap if entry[1].queued]
            heapq.heapify(self._heap)
