"""One run: every prompt at its time, through a door."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tqdm import tqdm

from benchmarks.serving.doors import Door, OpenDoor
from benchmarks.serving.workload import Prompt
from jaxserve.bench.traffic import DoorError, Outcome, Run, follow, send_all


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
        with tqdm(total=len(prompts), unit=" requests", leave=False, disable=not show_bar or None) as bar:

            async def ask(prompt: Prompt, run_start: float) -> Outcome:
                outcome = await _ask(door, prompt, run_start)
                bar.update()
                return outcome

            return await send_all(prompts, ask, concurrency=concurrency)


async def _ask(door: Door, prompt: Prompt, run_start: float) -> Outcome:
    sent = time.perf_counter()
    outcome = Outcome(start=sent - run_start)
    try:
        await follow(door.ask(prompt), outcome, sent)
    except DoorError as error:
        outcome.error = str(error)
    return outcome
