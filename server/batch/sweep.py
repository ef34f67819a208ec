"""The requests that have been read ahead, given out so that those that begin alike follow one another."""

from __future__ import annotations

from bisect import bisect_right, insort

from server.batch.requests import PreparedRequest


class Sweep:
    """A bounded number of requests in the order of their tokens, gone through from one end to the other.

    What is added behind the present place waits for the next round; so however many come, a request's
    neighbours are the ones that share most of its prompt among all that are here.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        """The most that it holds: requests, and bytes of their lines, which one request may exceed."""
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._requests: list[PreparedRequest] = []
        self._last = (b"", 0)
        """The sort key of the request that was taken last."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def full(self) -> bool:
        return len(self._requests) >= self._max_requests or self._num_bytes >= self._max_bytes

    def add(self, request: PreparedRequest) -> None:
        insort(self._requests, request, key=_key)
        self._num_bytes += _size(request)

    def next(self) -> PreparedRequest:
        """The request that `take` would give. Raises IndexError if there is none."""
        return self._requests[self._place()]

    def take(self) -> PreparedRequest:
        """The request after the last one in the order of tokens, or the first. Raises IndexError if empty."""
        request = self._requests.pop(self._place())
        self._last = request.sort_key
        self._num_bytes -= _size(request)
        return request

    def _place(self) -> int:
        place = bisect_right(self._requests, self._last, key=_key)
        return place if place < len(self._requests) else 0


def _key(request: PreparedRequest) -> tuple[bytes, int]:
    return request.sort_key


def _size(request: PreparedRequest) -> int:
    return len(request.line.data or b"")
