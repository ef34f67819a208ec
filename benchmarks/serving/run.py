"""One run: every prompt at its time, and when each piece of its answer came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from tqdm import tqdm

from benchmarks.serving.doors import Door, DoorError, OpenDoor, Usage
from benchmarks.serving.workload import Prompt

_NO_USAGE = Usage(0, 0)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How one request went. Times are in seconds."""

    start: float
    """When it was sent, from the start of the run."""
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

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None for an answer of one."""
        num_further = self.usage.output_tokens - 1
        return (self.latency - self.ttft) / num_further if num_further > 0 else None


@dataclass(frozen=True)
class Run:
    outcomes: list[Outcome]
    """In the order of the prompts."""
    seconds: float


async def run_load(
    open_door: OpenDoor,
    prompts: Sequence[Prompt],
    *,
    concurrency: int | None = None,
    num_warmups: int = 0,
    show_bar: bool = True,
) -> Run:
    """Ask everything and wait for all answers.

    Args:
        open_door: how to ask.
        prompts: with the times at which they arrive.
        concurrency: that are open at once; one that arrives when there are so many waits at the client, and
            its clock does not run.
        num_warmups: requests before that, which are not counted.
        show_bar: on standard error.

    Raises DoorError if a warm-up fails.
    """
    async with open_door() as door:
        now = time.perf_counter
        for warmed in await asyncio.gather(*(_ask(door, prompts[0], now()) for _ in range(num_warmups))):
            if warmed.error:
                raise DoorError(f"the first request failed: {warmed.error}")
        limit = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        start = now()
        with tqdm(total=len(prompts), unit=" requests", leave=False, disable=not show_bar or None) as bar:

            async def ask(prompt: Prompt) -> Outcome:
                async with limit:
                    outcome = await _ask(door, prompt, start)
                bar.update()
                return outcome

            tasks: list[asyncio.Task[Outcome]] = []
            for prompt in prompts:
                await asyncio.sleep(max(0.0, start + prompt.arrival - now()))
                tasks.append(asyncio.create_task(ask(prompt)))
            outcomes = await asyncio.gather(*tasks)
        return Run(outcomes, now() - start)


async def _ask(door: Door, prompt: Prompt, run_start: float) -> Outcome:
    sent = last = time.perf_counter()
    outcome = Outcome(start=sent - run_start)
    texts: list[str] = []
    try:
        async for piece in door.ask(prompt):
            if isinstance(piece, Usage):
                outcome.usage = piece
                continue
            now = time.perf_counter()
            if not texts:
                outcome.ttft = now - sent
            else:
                outcome.itls.append(now - last)
            last = now
            texts.append(piece)
        if not texts:
            raise DoorError("the answer was empty")
    except DoorError as error:
        outcome.error = str(error)
    outcome.latency = last - sent
    outcome.text = "".join(texts)
    return outcome
