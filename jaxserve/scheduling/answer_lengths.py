"""How long answers will be, by class, learnt from those that have ended."""

from __future__ import annotations

import math
from collections import deque

from jaxserve.scheduling.classes import SchedulerPolicy

_MEMORY = 256
"""Answers that are remembered."""
_PRIOR = 8
"""Answers that the class's `expected_output` counts for at first."""
_REFRESH = 16
"""New answers after which the remembered ones are sorted afresh."""


class AnswerLengths:
    """A running mean and quantiles of the tokens in an answer, for each class. Not thread-safe."""

    def __init__(self, policy: SchedulerPolicy) -> None:
        self._classes = [_Lengths(one.expected_output) for one in policy.classes]

    def observe(self, class_index: int, num_output: int) -> None:
        """An answer has ended with so many tokens."""
        self._classes[class_index].observe(num_output)

    def mean(self, class_index: int, max_tokens: int) -> float:
        """Expected tokens of an answer that may have at most `max_tokens`."""
        return min(self._classes[class_index].mean, float(max_tokens))

    def quantile(self, class_index: int, part: float, max_tokens: int) -> int:
        """Tokens that `part` of the answers stay within, at most `max_tokens`.

        Until a few dozen have ended it is the greater of that and the mean. Raises ValueError unless `part`
        lies in (0, 1].
        """
        if not 0.0 < part <= 1.0:
            raise ValueError(f"quantile {part} is out of range: it must be above 0 and at most 1")
        return min(self._classes[class_index].quantile(part), max_tokens)


class _Lengths:
    def __init__(self, expected: int) -> None:
        self.mean = float(expected)
        self._num_seen = 0
        self._latest: deque[int] = deque(maxlen=_MEMORY)
        self._sorted: list[int] = []

    def observe(self, num_output: int) -> None:
        self._num_seen += 1
        self.mean += (num_output - self.mean) / min(self._num_seen + _PRIOR, _MEMORY)
        self._latest.append(num_output)
        if self._num_seen % _REFRESH == 0:
            self._sorted = sorted(self._latest)

    def quantile(self, part: float) -> int:
        known = self._sorted
        if not known:
            return math.ceil(self.mean)
        value = known[math.ceil(part * len(known)) - 1]
        return value if len(known) >= 2 * _REFRESH else max(value, math.ceil(self.mean))
