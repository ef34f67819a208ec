"""The HTTP door over the fake engine, on a loopback port, in a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from jaxserve.loop import HostLoop
from server.core import Routes, Service
from server.http.app import build_app
from server.http.options import HttpOptions
from tests.fake_engine import FakeEngine
from tests.server.harness import OpenService, serving

_PATIENCE = 10.0


class HttpServer:
    """What a test may touch of a running server; the service lives in the server's event loop."""

    def __init__(
        self, open_service: OpenService, options: HttpOptions | None, patience: float = _PATIENCE
    ) -> None:
        """patience: seconds in which the service must have opened."""
        self._open_service = open_service
        self._options = options
        self._patience = patience
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.service: Service
        self.loop: HostLoop
        self.server: uvicorn.Server
        self.event_loop: asyncio.AbstractEventLoop
        self.thread = threading.Thread(target=self._run, name="http-server")

    def start(self) -> None:
        self.thread.start()
        assert self._started.wait(self._patience)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop serving. The harness then checks that no page and no slot is held."""
        self.server.should_exit = True
        self.thread.join(_PATIENCE)
        assert not self.thread.is_alive()
        if self._failure is not None:
            raise self._failure

    @property
    def port(self) -> int:
        return self.server.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def do(self, action: Callable[[], object]) -> None:
        """Do something in the server's event loop."""
        self.event_loop.call_soon_threadsafe(action)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + _PATIENCE
        while not condition():
            assert time.monotonic() < limit, "waited in vain"
            time.sleep(0.002)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: self.service.engine.num_open == 0)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # Raised again in the test's thread.
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        async with self._open_service() as (self.service, self.loop):
            self.event_loop = asyncio.get_running_loop()
            app = build_app(Routes.of(self.service), self._options)
            config = uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
            )
            self.server = uvicorn.Server(config)
            # `serve` would take over the process' signals.
            serve = asyncio.create_task(self.server._serve(sockets=[_listen()]))
            while not (self.server.started or serve.done()):
                await asyncio.sleep(0.002)
            self._started.set()
            await serve


def _listen() -> socket.socket:
    """A port of the system's choice. The system buffers little, so a client that reads nothing is felt.

    asyncio turns off Nagle's delay only where the protocol is named.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    return listener


@contextmanager
def http_server(
    device: FakeEngine | None = None,
    options: HttpOptions | None = None,
    *,
    max_waiting: int = 64,
    open_service: OpenService | None = None,
    patience: float = _PATIENCE,
) -> Iterator[HttpServer]:
    """`open_service` instead of a service over `device`, open within so many seconds."""
    open_service = open_service or functools.partial(serving, device, max_waiting=max_waiting)
    server = HttpServer(open_service, options, patience)
    server.start()
    try:
        yield server
    finally:
        server.stop()
