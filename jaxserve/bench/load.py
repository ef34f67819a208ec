"""One repeat of a cell: its requests at their times, cancelled and retried as planned, while things break."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import numpy as np

from jaxserve.bench.asks import Ask
from jaxserve.bench.cells import Work
from jaxserve.bench.faults import break_down
from jaxserve.bench.http_stream import bearer, stream_completion
from jaxserve.bench.scenarios import Fault
from jaxserve.bench.traffic import DoorError, Outcome, Run, follow, send_all

RETRY_HEADER = "x-stainless-retry-count"
"""What OpenAI's own clients count their retries in."""
_REFUSED_FOR_NOW = frozenset({httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE})
_FIRST_WAIT = 0.25
"""Seconds before a second try where the server names no time; doubled for each further one."""
_LONGEST_WAIT = 8.0


@dataclass(frozen=True)
class Target:
    """Whom to ask, and as whom."""

    client: httpx.AsyncClient
    model: str
    namespace: str
    """No request outside of it shares its prefixes."""
    tokens: Mapping[str, str]
    """Of tenants."""
    request_seconds: float
    """After which an answer is given up."""
    server_pid: int | None = None

    def headers(self, ask: Ask, attempt: int) -> dict[str, str]:
        headers = {RETRY_HEADER: str(attempt)} if attempt else {}
        return headers | bearer(self.tokens[ask.tenant]) if ask.tenant else headers


async def run_work(target: Target, work: Work, concurrency: int | None, fault: Fault | None = None) -> Run:
    """Ask everything of one repeat. Raises DoorError if what fills the cache is not answered, ValueError if
    there is nothing to break."""
    now = time.perf_counter
    for primer in work.primers:
        primed = await ask_once(target, primer, now())
        if primed.error:
            raise DoorError(f"the request that fills the cache failed: {primed.error}")

    async def ask(ask: Ask, run_start: float) -> Outcome:
        return await ask_once(target, ask, run_start)

    if fault is None:
        return await send_all(work.asks, ask, concurrency=concurrency)
    breaking = asyncio.create_task(break_down(fault, target.server_pid))
    try:
        run = await send_all(work.asks, ask, concurrency=concurrency)
        await breaking
    finally:
        breaking.cancel()
        await asyncio.gather(breaking, return_exceptions=True)  # until nothing that it began is left
    return run


async def ask_once(target: Target, ask: Ask, run_start: float) -> Outcome:
    """One request and, where it is refused for now, its retries; how it went, also where it failed.

    Times run from its first try. `run_start`: the clock at the start of the run.
    """
    sent = time.perf_counter()
    outcome = Outcome(start=sent - run_start)
    body = ask.body(target.model, target.namespace)
    # Waits differ between requests, and not between runs.
    jitter = np.random.default_rng(ask.sampling.get("seed", 0))
    for attempt in range(ask.attempts):
        outcome.attempts = attempt + 1
        outcome.error = ""
        pieces = stream_completion(target.client, body, target.headers(ask, attempt))
        try:
            async with asyncio.timeout(target.request_seconds):
                await follow(pieces, outcome, sent, leave_after=ask.leave_after)
            break
        except TimeoutError:
            outcome.error = f"no end after {target.request_seconds:g} s"
            break
        except DoorError as error:
            outcome.error = str(error)
            if error.status not in _REFUSED_FOR_NOW or attempt + 1 == ask.attempts:
                break
            own = _FIRST_WAIT * 2**attempt * jitter.uniform(0.5, 1.5)
            await asyncio.sleep(min(max(own, error.retry_after or 0.0), _LONGEST_WAIT))
    return outcome
