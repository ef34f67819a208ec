"""A histogram that is cheap to observe into: one search, two additions, no lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""vLLM's bounds, so that its dashboards read the same; likewise those below, with shorter times added."""
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)


def token_bounds(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to a number of tokens."""
    steps = (mantissa * 10.0**exponent for exponent in range(12) for mantissa in (1, 2, 5))
    return tuple(step for step in steps if step <= most) or (1.0,)


class Histogram:
    """Counts by bucket, and their sum. Use it in one thread; another one may read it a moment stale."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the ascending upper bounds of the buckets, each part of its own; one more is infinite."""
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds {tuple(bounds)} do not ascend")
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of what was observed."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """For each bound, as Prometheus spells it, how many values were at most that."""
        return cumulative(self._bounds, self._counts)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them, from counts of which the last has no bound.

    Raises ValueError if there is not one count more than bounds.
    """
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
