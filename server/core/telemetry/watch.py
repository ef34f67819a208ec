"""When the tokens of one request pass."""

from __future__ import annotations

import time

from jaxserve.outputs import AnswerDelta
from server.core.telemetry.histogram import Histogram


class StreamWatch:
    """Times the tokens of one request as its door takes them; what a slow reader left waiting comes at once.

    It sees every delta of every stream, so it holds its histograms and looks nothing up.
    """

    __slots__ = ("_between", "_first", "_last", "arrival_time", "first_token_time", "num_tokens")

    def __init__(self, arrival_time: float, num_samples: int, first: Histogram, between: Histogram) -> None:
        """Start watching.

        Args:
            arrival_time: of the request, in seconds of `time.monotonic`.
            num_samples: how many answers it gets.
            first: takes the time from arrival to the first token, in seconds.
            between: takes the time from one delta of a sample to its next.
        """
        self.arrival_time = arrival_time
        self.first_token_time: float | None = None
        self.num_tokens = 0
        """That have passed, over all samples."""
        self._first = first
        self._between = between
        self._last = [0.0] * num_samples
        """When each sample's latest tokens passed; 0 before the first."""

    def take(self, delta: AnswerDelta) -> None:
        """A delta passes."""
        num_tokens = len(delta.token_ids)
        if not num_tokens:
            return
        now = time.monotonic()
        self.num_tokens += num_tokens
        last = self._last[delta.index]
        self._last[delta.index] = now
        if last:
            self._between.observe(now - last)
        elif self.first_token_time is None:
            self.first_token_time = now
            self._first.observe(now - self.arrival_time)
