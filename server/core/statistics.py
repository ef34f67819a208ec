"""Counts over the life of a service."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.outputs import RequestOutput
from server.core.errors import Status


@dataclass
class Statistics:
    """Everything counts up from the start of the service."""

    num_admitted: int = 0
    num_refused: Counter[Status] = field(default_factory=Counter[Status])
    """Requests that were never admitted, by why."""
    num_finished: Counter[str] = field(default_factory=Counter[str])
    """Answered requests, by the finish reason of their first sample."""
    num_failed: Counter[Status] = field(default_factory=Counter[Status])
    """Admitted requests without an answer, by why."""
    num_prompt_tokens: int = 0
    """Of answered requests."""
    num_completion_tokens: int = 0
    num_preemptions: int = 0

    def count_output(self, output: RequestOutput) -> None:
        self.num_finished[output.outputs[0].finish_reason] += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_completion_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        self.num_preemptions += output.metrics.num_preemptions


class RateMeter:
    """Turns a total that only grows into a rate a second, over at least `window` seconds where it can."""

    def __init__(self, *, window: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._since = (clock(), 0)
        self._rate = 0.0

    def read(self, total: int) -> float:
        """The rate until now, given the total by now."""
        now = self._clock()
        since, before = self._since
        if now - since >= self._window:
            self._rate = (total - before) / (now - since)
            self._since = (now, total)
        return self._rate
