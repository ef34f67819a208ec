"""A serving process over the fake engine that looks for leaks: `python -m tests.server.abuse.server`.

Prints its addresses, serves until SIGTERM, and ends with status 0 only if all pages, slots and streams are
free.
"""

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
from tests.server.harness import IDENTITY, TOKENIZER, PacedEngine

NUM_SLOTS = 16


class QuickEngine(PacedEngine):
    pace = 0.001


async def main() -> int:
    loop = make_loop(QuickEngine(fake_limits(num_slots=NUM_SLOTS)), TOKENIZER, cache=CACHE, gated=True)
    routes = Routes.of(Service(IDENTITY, TOKENIZER, Engine(loop)))
    status = await serve(
        routes,
        [GrpcDoor(routes, GrpcOptions()), HttpDoor(routes)],
        drain_seconds=10.0,
        announce=lambda addresses: print(*addresses, flush=True),
    )
    loop.check_integrity()
    assert loop.num_open == loop.num_running == 0, "something is open that nobody waits for"
    return status


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
