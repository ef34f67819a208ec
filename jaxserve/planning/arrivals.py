"""Who comes next: the requests of a trace, and those that were turned away and try again."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from jaxserve.planning.traces import Trace, TraceRequest


class Arrival(NamedTuple):
    """A client at the door."""

    time: float
    """Seconds of the virtual clock; ties go to the lower number."""
    number: int
    """Its request's place in the trace."""
    num_tries: int
    """Times that it was turned away before."""


class Arrivals:
    """First tries in the order of the trace, and second ones when their time has come."""

    def __init__(self, trace: Trace) -> None:
        self._requests = trace.requests
        self._num_arrived = 0
        self._again: list[Arrival] = []

    @property
    def next_time(self) -> float:
        """When somebody comes next; infinite if nobody does."""
        first = self._requests[self._num_arrived].arrival if self._num_arrived < len(self._requests) else inf
        return min(first, self._again[0].time) if self._again else first

    def due(self, now: float) -> Iterator[tuple[Arrival, TraceRequest]]:
        """Those who have come by now and not been seen yet, in order."""
        while self.next_time <= now:
            if self._again and self._again[0].time == self.next_time:
                arrival = heapq.heappop(self._again)
            else:
                number = self._num_arrived
                arrival = Arrival(self._requests[number].arrival, number, 0)
                self._num_arrived += 1
            yield arrival, self._requests[arrival.number]

    def come_back(self, arrival: Arrival, time: float) -> None:
        """A client that was turned away will try again at `time`."""
        heapq.heappush(self._again, Arrival(time, arrival.number, arrival.num_tries + 1))
