"""A service over the fake engine, and what several tests ask of it."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from jaxserve.async_engine import Engine
from jaxserve.loop import HostLoop
from jaxserve.opened_model import make_loop
from jaxserve.plan import EngineLimits, SamplingParams, StepHandle, StepResult
from jaxserve.scheduling import DEFAULT_POLICY, SchedulerPolicy
from jaxserve.speculation import Speculation
from server.core import GenerateRequest, ModelIdentity, Service
from server.core.identity import tokenizer_fingerprint
from tests.fake_engine import FakeEngine
from tests.fake_model import CACHE, byte_tokenizer, fake_limits
from tests.fake_sequence import expected_answer

OpenService = Callable[[], AbstractAsyncContextManager[tuple[Service, HostLoop]]]
"""Opens a running service over a loop, and closes it with a look at its pages."""

TOKENIZER = byte_tokenizer()
IDENTITY = ModelIdentity(
    name="fake",
    model="fake",
    path="/models/fake",
    family="fake",
    fingerprint="f" * 32,
    tokenizer_fingerprint=tokenizer_fingerprint(TOKENIZER),
    precision="float32",
    kv_format="int8",
    device="cpu",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


class PacedEngine(FakeEngine):
    """Takes a moment for each step, as a device would."""

    pace = 0.002

    def collect(self, handle: StepHandle) -> StepResult:
        time.sleep(self.pace)
        return super().collect(handle)


class SlowEngine(PacedEngine):
    """Takes so long that a test can meet a request in the middle: ENDLESS lasts two seconds."""

    pace = 0.02


class HangingEngine(FakeEngine):
    """Brings no result before it is released."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(limits)
        self.released = threading.Event()

    def collect(self, handle: StepHandle) -> StepResult:
        assert self.released.wait(30)
        return super().collect(handle)


@asynccontextmanager
async def serving(
    device: FakeEngine | None = None,
    *,
    max_waiting: int = 64,
    policy: SchedulerPolicy = DEFAULT_POLICY,
    prefix_cache: bool = True,
    speculation: Speculation | None = None,
) -> AsyncIterator[tuple[Service, HostLoop]]:
    """A running service, and its loop to look at; afterwards every page and slot must be free."""
    loop = make_loop(
        device or PacedEngine(fake_limits()),
        TOKENIZER,
        cache=CACHE if prefix_cache else None,
        policy=replace(policy, max_waiting=max_waiting),
        gated=True,
        speculation=speculation,
    )
    engine = Engine(loop)
    try:
        yield Service(IDENTITY, TOKENIZER, engine), loop
    finally:
        if engine.failure is None:
            engine.close()
    loop.check_integrity()
    assert loop.num_open == loop.num_running == 0


async def answer(service: Service, request: GenerateRequest) -> list[int]:
    """Token ids of a request's first sample, as they were streamed."""
    return [token async for delta in await service.generate(request) for token in delta.token_ids]


def expected(text: str, params: SamplingParams, seed: int = 0) -> list[int]:
    """Token ids of the answer to a text."""
    return expected_answer(fake_limits(), TOKENIZER.encode(text), params, seed)[0]
