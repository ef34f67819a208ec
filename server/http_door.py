"""Runs the HTTP application in the event loop of the service, beside the gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence

import uvicorn

from server.core import Routes
from server.core.ports import listen
from server.core.tls import TlsFiles
from server.http.app import build_app
from server.http.options import HttpOptions
from server.http.tool_speech import ToolParserName

_START_POLL = 0.005
_KEEP_ALIVE_SECONDS = 75
"""For an idle connection. Longer than usual clients keep one (httpx, so OpenAI's, 5 s): one that the server
closes just as its client uses it again is a request that fails."""


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process, which has more to stop than this."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpDoor:
    """Serves a server's routes over HTTP, in the event loop that starts it."""

    def __init__(
        self,
        routes: Routes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: TlsFiles | None = None,
        tokens: Mapping[str, str] | None = None,
        allow_origins: Sequence[str] = (),
        tool_parser: ToolParserName = "auto",
    ) -> None:
        """Prepare a door.

        Args:
            routes: what is served.
            host: the address to listen on.
            port: 0 takes a free one.
            tls: without it, the door speaks plain HTTP.
            tokens: the tenant of each bearer token; None asks nobody for one.
            allow_origins: web origins whose pages may ask; "*" is all.
            tool_parser: see `HttpOptions`.
        """
        self._host = host
        self._port = port
        self._scheme = "http" if tls is None else "https"
        options = HttpOptions(tokens=tokens, allow_origins=tuple(allow_origins), tool_parser=tool_parser)
        app = build_app(routes, options)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=_KEEP_ALIVE_SECONDS
        )
        if tls is not None:
            config.ssl_certfile = str(tls.certificate)
            config.ssl_keyfile = str(tls.key)
            if tls.client_ca is not None:
                config.ssl_ca_certs = str(tls.client_ca)
                config.ssl_cert_reqs = ssl.CERT_REQUIRED
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Open the port; return the address. Raises ValueError if the port cannot be had."""
        listener = listen(self._host, self._port)
        # asyncio sets this only where it makes the socket itself; without it a short answer waits for the
        # client's delayed acknowledgement, some 40 ms. Accepted connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not (self._server.started or self._task.done()):
            await asyncio.sleep(_START_POLL)  # uvicorn has no event for it
        if self._task.done():
            await self._task
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{listener.getsockname()[1]}"

    async def update(self) -> None:
        """Nothing to announce: `/ready` asks the routes."""

    async def stop(self, grace: float) -> None:
        """Close the port; answers that are still open after `grace` seconds are cut off."""
        if self._task is None or self._task.done():
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.force_exit = grace == 0
        self._server.should_exit = True
        await self._task
