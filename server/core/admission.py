"""How much may wait, and how long a refused client should stay away."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from server.core.errors import ServiceError, Status

_REMEMBERED_ENDS = 64
_SHORTEST_RETRY, _LONGEST_RETRY, _UNKNOWN_RETRY = 0.05, 60.0, 1.0


class Admission:
    """A bounded queue: beyond `max_waiting` requests that cannot run yet, a new one is refused at once."""

    def __init__(
        self, num_slots: int, max_waiting: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ValueError for a negative `max_waiting`."""
        if max_waiting < 0:
            raise ValueError(f"max_waiting {max_waiting} is negative")
        self.num_slots = num_slots
        self.max_waiting = max_waiting
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)

    def admit(self, num_open: int) -> None:
        """Raise ServiceError if so many open requests leave no room for another one to wait."""
        num_waiting = num_open - self.num_slots
        if num_waiting >= self.max_waiting:
            raise ServiceError(
                Status.RESOURCE_EXHAUSTED,
                f"{max(num_waiting, 0)} requests wait already; the limit is {self.max_waiting}",
                self.retry_after(num_waiting),
                reason="queue_full",
            )

    def mark_end(self) -> None:
        """A request has ended."""
        self._ends.append(self._clock())

    def retry_after(self, num_waiting: int) -> float:
        """Seconds in which the queue empties at the rate at which requests have ended lately."""
        if len(self._ends) < 2:
            return _UNKNOWN_RETRY
        seconds_per_end = (self._clock() - self._ends[0]) / len(self._ends)
        return min(max((num_waiting + 1) * seconds_per_end, _SHORTEST_RETRY), _LONGEST_RETRY)
