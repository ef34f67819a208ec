"""How fast those who wait are served, measured while somebody waits."""

from __future__ import annotations

from math import ceil, exp, inf, log

_MEMORY = 30.0
"""Seconds of backlog after which a measurement counts for 1/e, if that leaves enough of them."""
_ENOUGH_STARTS = 32.0
"""Requests' starts that are not forgotten before others have come, however slow they are."""
_CONFIDENT_STARTS = 16.0
_CONFIDENT_SECONDS = 1.0
_INDICATIVE_STARTS = 4.0
_INDICATIVE_SECONDS = 0.5
SHORTEST_RETRY, LONGEST_RETRY, UNKNOWN_RETRY = 0.05, 60.0, 1.0
"""Seconds that a refused client is asked to stay away: at least, at most, and when nothing is known."""

_CONGESTED = 0.5
"""Part of the time from which on a backlog is no burst any more."""


class Congestion:
    """Whether those who wait are a burst, which will pass, or a queue that stands.

    A queue that takes up a burst is what a queue is for; one that stands only delays everybody (Nichols and
    Jacobson, "Controlling Queue Delay", 2012).
    """

    def __init__(self) -> None:
        self._clock: float | None = None
        self._seconds = 0.0
        self._seconds_of_backlog = 0.0

    def advance(self, now: float, backlog: bool) -> None:
        """Time has passed until `now`, with a `backlog` or without. A clock that goes back is ignored."""
        if self._clock is None:
            self._clock = now
        elapsed = max(now - self._clock, 0.0)
        kept = exp(-elapsed / _MEMORY)
        new = _MEMORY * (1.0 - kept)
        self._seconds = self._seconds * kept + new
        self._seconds_of_backlog = self._seconds_of_backlog * kept + (new if backlog else 0.0)
        self._clock += elapsed

    @property
    def standing(self) -> bool:
        """Whether there was a backlog most of the time; so it is taken to be while nothing is known."""
        return self._seconds_of_backlog >= _CONGESTED * self._seconds


class DrainRate:
    """Requests and tokens that get a slot per second of backlog; older seconds fade.

    Time without a backlog says nothing of what the engine could do, and does not count.
    """

    def __init__(self) -> None:
        self._clock = -inf
        self._seconds = 0.0
        self._starts = 0.0
        self._tokens = 0.0
        self._num_refused = 0

    def advance(self, now: float, backlog: bool) -> None:
        """Time has passed until `now`, with a `backlog` or without. A clock that goes back is ignored."""
        elapsed = now - self._clock
        if 0.0 < elapsed < inf and backlog:
            kept = max(
                exp(-elapsed / _MEMORY), min(_ENOUGH_STARTS / self._starts, 1.0) if self._starts else 1.0
            )
            # The new seconds fade on their way too, so that a steady stream is measured without bias.
            self._seconds = self._seconds * kept + elapsed * (
                (1.0 - kept) / -log(kept) if kept < 1.0 else 1.0
            )
            self._starts *= kept
            self._tokens *= kept
        self._clock = max(self._clock, now)

    def start(self, num_requests: int, num_tokens: float) -> None:
        """Requests have got their slots after waiting for others."""
        self._starts += num_requests
        self._tokens += num_tokens

    @property
    def confident(self) -> bool:
        """Whether enough was measured to refuse somebody on the strength of it."""
        return self._starts >= _CONFIDENT_STARTS and self._seconds >= _CONFIDENT_SECONDS

    @property
    def indicative(self) -> bool:
        """Whether at least the order of magnitude is known."""
        return self._starts >= _INDICATIVE_STARTS and self._seconds >= _INDICATIVE_SECONDS

    @property
    def requests_per_second(self) -> float:
        """0 if nothing is known."""
        return self._starts / self._seconds if self._seconds > 0.0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """0 if nothing is known."""
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    def retry_after(self, num_requests: float) -> float:
        """Seconds in which so many requests are served, and up to twice that: the refused are told to come
        back one after another, at the rate at which they can be let in, and not all at once."""
        rate = self.requests_per_second
        if rate <= 0.0:
            return UNKNOWN_RETRY
        place = self._num_refused % ceil(max(num_requests, 1.0))
        self._num_refused += 1
        return min(max((num_requests + place) / rate, SHORTEST_RETRY), LONGEST_RETRY)
