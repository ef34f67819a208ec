"""Several models behind one server, over a fake engine each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from jaxserve.async_engine import Engine
from jaxserve.opened_model import make_loop
from jaxserve.scheduling import SchedulerPolicy
from server.core import Routes, Service
from tests.fake_engine import FakeEngine
from tests.fake_model import CACHE, fake_limits
from tests.server.harness import IDENTITY, TOKENIZER, SlowEngine

FALLBACKS = {"chat": "small", "small": "tiny", "tiny": None}


@asynccontextmanager
async def routed(
    fallbacks: dict[str, str | None],
    *,
    loaded: tuple[str, ...] | None = None,
    max_waiting: int = 0,
    devices: dict[str, FakeEngine] | None = None,
    identities: dict[str, dict[str, Any]] | None = None,
    defaults: dict[str, dict[str, Any]] | None = None,
) -> AsyncIterator[Routes]:
    """Routes over an engine each; afterwards every page and slot must be free."""
    routes = Routes(fallbacks)
    async with AsyncExitStack() as stack:
        for name in fallbacks if loaded is None else loaded:
            device = (devices or {}).get(name) or SlowEngine(fake_limits(num_slots=1))
            policy = SchedulerPolicy(max_waiting=max_waiting)
            loop = make_loop(device, TOKENIZER, cache=CACHE, policy=policy, gated=True)
            stack.callback(loop.check_integrity)
            engine = Engine(loop)
            stack.callback(close, engine)
            identity = replace(IDENTITY, name=name, model=f"{name} model", **(identities or {}).get(name, {}))
            service = Service(
                identity,
                TOKENIZER,
                engine,
                sampling_defaults=(defaults or {}).get(name),
            )
            routes.open(service)
        yield routes


def close(engine: Engine) -> None:
    if engine.failure is None:
        engine.close()
