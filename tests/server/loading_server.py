"""A serving process whose models load when it is told to: `python -m tests.server.loading_server NAME...`.

Each byte on standard input loads the next model; `x` fails to. Prints the doors' addresses when they are open
and `ready` when all is loaded.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxserve.async_engine import Engine
from jaxserve.opened_model import make_loop
from server.core import Routes, Service
from server.grpc_server import GrpcDoor, GrpcOptions
from server.http_door import HttpDoor
from server.process import serve
from tests.fake_model import fake_limits
from tests.server.harness import IDENTITY, TOKENIZER, SlowEngine


def load(names: Sequence[str]) -> Iterator[Service]:
    for name in names:
        if os.read(0, 1) == b"x":
            raise ValueError(f"{name} names no model")
        engine = Engine(make_loop(SlowEngine(fake_limits()), TOKENIZER))
        yield Service(replace(IDENTITY, name=name), TOKENIZER, engine)


async def main(names: Sequence[str]) -> int:
    routes = Routes(dict.fromkeys(names))
    return await serve(
        routes,
        [GrpcDoor(routes, GrpcOptions()), HttpDoor(routes)],
        loading=load(names),
        drain_seconds=30,
        on_open=lambda addresses: print(*addresses, flush=True),
        announce=lambda addresses: print("ready", flush=True),
    )


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
