"""A gRPC server that outlives breakdowns of its serving loop.

grpcio's asyncio server (1.85 and before) decodes the path of a call in the loop that accepts calls, outside
of any handler and before any interceptor: one call whose path is no UTF-8 ends the loop, and with it the
server. Where methods are registered by name, that also frees memory that the core still writes to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

_NUM_SERVERS = 8
"""Clients are spread over them: so many times fewer lose a call that had come and was not yet accepted when
theirs broke down. The core cancels such a call, and nothing can be done about that here."""
_LOOK_SECONDS = 0.25
"""How long a breakdown may go unnoticed, while the other servers take all new connections."""

_log = logging.getLogger("jaxserve.server")


class GenericHandlers:
    """Stands for a server where services are added: their methods are looked up, and not registered."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Nothing: the generic handlers have them all."""


class EnduringServer:
    """Servers that share a port, so that others are there while one that has broken down is replaced.

    Calls that are open stay with a broken server until they end; its clients are told to connect anew.
    """

    def __init__(
        self, make: Callable[[], grpc.aio.Server], bind: Callable[[grpc.aio.Server, int], int]
    ) -> None:
        """Prepare the servers.

        Args:
            make: a new server with its services, which must be added through `GenericHandlers`, and with
                the option grpc.so_reuseport.
            bind: open a port, 0 for any, and return which; raises RuntimeError if it cannot be had.
        """
        self._make = make
        self._bind = bind
        self._servers: set[grpc.aio.Server] = set()
        """The broken ones among them until their last call has ended."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> int:
        """Listen; return the port. Raises RuntimeError if it cannot be had."""
        for _ in range(_NUM_SERVERS):
            server, port = await self._open(port)
            self._spawn(self._keep_open(server, port))
        return port

    async def stop(self, grace: float) -> None:
        """Close the port; calls that are still open after `grace` seconds are cut off."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(server.stop(grace) for server in self._servers))

    async def _open(self, port: int) -> tuple[grpc.aio.Server, int]:
        server = self._make()
        port = self._bind(server, port)
        await server.start()
        self._servers.add(server)
        return server, port

    async def _keep_open(self, server: grpc.aio.Server, port: int) -> None:
        while True:
            breakdown = await _breakdown(server, _LOOK_SECONDS)
            if breakdown is not None:
                _log.error("a gRPC server broke down and is replaced: %r", breakdown)
                self._spawn(self._retire(server))
                server, _ = await self._open(port)

    async def _retire(self, server: grpc.aio.Server) -> None:
        await _breakdown(server, None)
        await server.stop(None)
        self._servers.discard(server)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _breakdown(server: grpc.aio.Server, seconds: float | None) -> Exception | None:
    """What has ended a server's loop, once that is known and, for None seconds, its last call has ended."""
    try:
        await server.wait_for_termination(seconds)
    except Exception as error:
        return error
    return None
