"""Requests at their times, and when each piece of their answers came: what every load stands on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np


class Usage(NamedTuple):
    """What the server says that it has read and written."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those that it had computed before."""


class Answerer(NamedTuple):
    """Who answers, where the server says it."""

    route: str
    reason: str


Piece = str | Usage | Answerer
"""A part of the answer's text, of which a door may not know more than that it came; or what is said of it."""
_NO_USAGE = Usage(0, 0)


class DoorError(Exception):
    """A request that was not answered, and why."""

    def __init__(self, message: str, *, status: int = 0, retry_after: float | None = None) -> None:
        """`status`: HTTP's, 0 where there is none. `retry_after`: seconds, where the server names them."""
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How one request went. Times are in seconds."""

    start: float
    """When it was first sent, from the start of the run."""
    ttft: float = 0.0
    """From there to its first piece."""
    itls: list[float] = field(default_factory=list[float])
    """From each piece to the next."""
    latency: float = 0.0
    """From sending to the last piece."""
    usage: Usage = _NO_USAGE
    text: str = ""
    error: str = ""
    """Why there is no answer; empty if there is one."""
    cancelled: bool = False
    """Whether the client left before the end, as it meant to."""
    attempts: int = 1
    """How often it was sent."""
    route: str = ""
    """What answered, where the server says it."""

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None for an answer of one."""
        num_further = self.usage.output_tokens - 1
        return (self.latency - self.ttft) / num_further if num_further > 0 else None


@dataclass(frozen=True)
class Run:
    outcomes: list[Outcome]
    """In the order of the requests."""
    seconds: float


async def follow(
    pieces: AsyncGenerator[Piece, None], outcome: Outcome, sent: float, *, leave_after: int | None = None
) -> None:
    """Write an answer into its outcome as it comes.

    Args:
        pieces: of the answer.
        outcome: of which times, text, usage and route are set.
        sent: the clock when the request was first sent.
        leave_after: pieces of text after which the answer is cancelled.

    Raises DoorError if there is no answer, or an empty one.
    """
    texts: list[str] = []
    last = sent
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Usage):
                    outcome.usage = piece
                    continue
                if isinstance(piece, Answerer):
                    outcome.route = piece.route
                    continue
                now = time.perf_counter()
                if not texts:
                    outcome.ttft = now - sent
                else:
                    outcome.itls.append(now - last)
                last = now
                texts.append(piece)
                if len(texts) == leave_after:
                    outcome.cancelled = True
                    break
        if not texts:
            raise DoorError("the answer was empty")
    finally:
        outcome.latency = last - sent
        outcome.text = "".join(texts)


class Timed(Protocol):
    """Something that is sent at its time."""

    @property
    def arrival(self) -> float:
        """Seconds from the start of the run."""
        ...


_Timed = TypeVar("_Timed", bound=Timed)


async def send_all(
    requests: Sequence[_Timed],
    ask: Callable[[_Timed, float], Awaitable[Outcome]],
    *,
    concurrency: int | None = None,
) -> Run:
    """Ask everything at its time and wait for all answers.

    Args:
        requests: in the order of their arrivals.
        ask: asks one; it is told the clock at the start of the run.
        concurrency: that are open at once; one that arrives when there are so many waits at the client, and
            its clock does not run.
    """
    limit = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    start = time.perf_counter()

    async def ask_within_limit(request: _Timed) -> Outcome:
        async with limit:
            return await ask(request, start)

    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Outcome]] = []
        for request in requests:
            await asyncio.sleep(max(0.0, start + request.arrival - time.perf_counter()))
            tasks.append(group.create_task(ask_within_limit(request)))
    return Run([task.result() for task in tasks], time.perf_counter() - start)


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which so many requests arrive at so many a second in the mean.

    Gaps are gamma-distributed: burstiness 1 is a Poisson process, less comes in bursts, infinity is a
    metronome. Together the gaps take exactly as long as the rate says, so that runs of other seeds compare.
    An infinite rate is all at once. Raises ValueError for a rate or burstiness that is not above 0.
    """
    if not (rate > 0 and burstiness > 0):
        raise ValueError(f"rate {rate} and burstiness {burstiness} must be above 0")
    if np.isinf(rate):
        return [0.0] * num_requests
    if np.isinf(burstiness):
        gaps = np.ones(num_requests)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, size=num_requests)
    return (np.cumsum(gaps) * (num_requests / rate / gaps.sum())).tolist()
