"""A serving process over the fake engine: `python -m tests.server.fake_server [FAIL_AT [DRAIN_SECONDS]]`."""

from __future__ import annotations

import asyncio
import sys

from jaxserve.async_engine import Engine
from jaxserve.opened_model import make_loop
from server.core import Routes, Service
from server.grpc_server import GrpcDoor, GrpcOptions
from server.http_door import HttpDoor
from server.process import serve
from tests.fake_model import CACHE, fake_limits
from tests.server.harness import IDENTITY, TOKENIZER, SlowEngine


async def main(fail_at: int | None, drain_seconds: float) -> int:
    device = SlowEngine(fake_limits(), fail_at=fail_at)
    engine = Engine(make_loop(device, TOKENIZER, cache=CACHE, gated=True))
    service = Service(IDENTITY, TOKENIZER, engine)
    routes = Routes.of(service)
    return await serve(
        routes,
        [GrpcDoor(routes, GrpcOptions()), HttpDoor(routes)],
        drain_seconds=drain_seconds,
        announce=lambda addresses: print(*addresses, flush=True),
    )


if __name__ == "__main__":
    arguments = sys.argv[1:] + ["never", "30"][len(sys.argv) - 1 :]
    failing = None if arguments[0] == "never" else int(arguments[0])
    sys.exit(asyncio.run(main(failing, float(arguments[1]))))
