"""What a simulation remembers: a row for each request, and samples of how the loop stood."""

from __future__ import annotations

import numpy as np

from jaxserve.loop import LoopSnapshot
from jaxserve.outputs import RequestOutput
from jaxserve.planning.traces import Trace

COMPLETED = "completed"
OPEN = "open"
"""The outcome of what has not ended; after a simulation none is left."""


class Records:
    """Columns over the requests of a trace, in its order. Times are seconds of the virtual clock, NaN for
    what never happened."""

    def __init__(self, trace: Trace) -> None:
        requests = trace.requests
        num = len(requests)
        self.arrival = np.array([request.arrival for request in requests])
        self.prompt_tokens = np.array([request.prompt_tokens for request in requests], np.int64)
        self.tenant = np.array([request.tenant for request in requests], np.str_)
        self.priority = np.array([request.priority for request in requests], np.str_)
        self.scheduled = np.full(num, np.nan)
        """First admission to a slot."""
        self.first_token = np.full(num, np.nan)
        self.end = np.full(num, np.nan)
        self.output_tokens = np.zeros(num, np.int64)
        self.cached_tokens = np.zeros(num, np.int64)
        """Prompt tokens found in the prefix cache."""
        self.preemptions = np.zeros(num, np.int64)
        self.num_retries = np.zeros(num, np.int64)
        """Times that the client came back after it had been turned away."""
        self.outcome = np.full(num, OPEN, object)
        """Completed, open, the reason of a refusal, or how the request was cut off."""
        self.rejected = np.zeros(num, np.bool_)
        """Refused at the door."""

    def reject(self, number: int, reason: str, now: float) -> None:
        """A request was refused at the door. Raises RuntimeError if it had ended before."""
        self._close(number, reason, now)
        self.rejected[number] = True

    def finish(self, number: int, outcome: str, output: RequestOutput) -> None:
        """A request that was let in has ended. Raises RuntimeError if it had ended before."""
        metrics = output.metrics
        self._close(number, outcome, metrics.finish_time)
        if metrics.scheduled_time is not None:
            self.scheduled[number] = metrics.scheduled_time
        if metrics.first_token_time is not None:
            self.first_token[number] = metrics.first_token_time
        self.output_tokens[number] = sum(len(sample.token_ids) for sample in output.outputs)
        self.cached_tokens[number] = output.num_cached_tokens
        self.preemptions[number] = metrics.num_preemptions

    def _close(self, number: int, outcome: str, now: float) -> None:
        if self.outcome[number] != OPEN:
            raise RuntimeError(f"request {number} ended twice: {self.outcome[number]}, then {outcome}")
        self.outcome[number] = outcome
        self.end[number] = now

    @property
    def completed(self) -> np.ndarray:
        return self.outcome == COMPLETED

    @property
    def queue_seconds(self) -> np.ndarray:
        """From arrival to the first admission."""
        return self.scheduled - self.arrival

    @property
    def wait_seconds(self) -> np.ndarray:
        """From arrival to admission or, for what was never admitted, to its end."""
        return np.where(np.isnan(self.scheduled), self.end, self.scheduled) - self.arrival

    @property
    def ttft(self) -> np.ndarray:
        """Time to first token."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> np.ndarray:
        """Time per output token after the first; NaN for answers of one token."""
        rest = np.where(self.output_tokens > 1, self.output_tokens - 1, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rest > 0, (self.end - self.first_token) / rest, np.nan)


class Timeline:
    """Samples over time, at most a thousand or so however long it gets: then every other one is dropped."""

    _MOST = 1024

    def __init__(self, interval: float = 0.05) -> None:
        self._interval = interval
        self._next = 0.0
        self._samples: list[tuple[float, int, int, tuple[int, ...]]] = []

    def due(self, now: float) -> bool:
        """Whether it is time for a sample."""
        return now >= self._next

    def add(self, now: float, snapshot: LoopSnapshot) -> None:
        """Take a sample."""
        self._samples.append((now, snapshot.num_running, snapshot.num_waiting, snapshot.num_free_pages))
        if len(self._samples) > self._MOST:
            self._samples = self._samples[::2]
            self._interval *= 2
        self._next = now + self._interval

    @property
    def time(self) -> np.ndarray:
        return np.array([sample[0] for sample in self._samples])

    @property
    def running(self) -> np.ndarray:
        return np.array([sample[1] for sample in self._samples])

    @property
    def waiting(self) -> np.ndarray:
        return np.array([sample[2] for sample in self._samples])

    @property
    def free_pages(self) -> np.ndarray:
        """[samples, groups]."""
        return np.array([sample[3] for sample in self._samples])
