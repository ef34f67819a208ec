"""The life of a serving process: open the doors, load, wait for a signal or a failure, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from jaxserve.device_loss import DeviceLostError
from server.core import Routes, Service

FAILED = 1
INTERRUPTED = 130
"""By a second signal, or by Ctrl-C before there was anything to serve."""

_log = logging.getLogger("jaxserve.server")

_FAILURE_POLL = 0.05
_LAST_WORDS = 2.0
"""Seconds for statuses to reach their clients after a failure, and for answers that have just ended."""


class Door(Protocol):
    """A way to the routes."""

    async def start(self) -> str:
        """Open; return the address. Raises ValueError if that cannot be had."""
        ...

    async def update(self) -> None:
        """The routes stand otherwise now: tell who asks for readiness."""
        ...

    async def stop(self, grace: float) -> None:
        """Close; what is still open after `grace` seconds is cut off."""
        ...


async def serve(
    routes: Routes,
    doors: Sequence[Door],
    *,
    loading: Iterable[Service] = (),
    drain_seconds: float,
    on_open: Callable[[Sequence[str]], object] = lambda addresses: None,
    announce: Callable[[Sequence[str]], object],
) -> int:
    """Serve until a signal or a failure of an engine; return the exit status.

    The doors are open at once, and each route answers from when its service is there. SIGTERM or SIGINT
    drains: new requests are refused as UNAVAILABLE, open ones have `drain_seconds` to end, the status is 0,
    or 130 for a SIGINT before all was loaded. A second signal stops at once with 130. A failure of an engine
    ends its streams as INTERNAL and drains the other routes, with status 1; so does the loss of a process
    that has some of its devices, but as UNAVAILABLE.

    Args:
        routes: what is served. The engines are closed at the end, unless one has failed or is not waited for.
        doors: opened in this order.
        loading: brings the services of routes that are not open yet, each when it is loaded; it is read on a
            thread of its own, which is left behind if the process ends meanwhile.
        drain_seconds: after which open requests end as UNAVAILABLE.
        on_open: called with the doors' addresses when they are open.
        announce: called with the doors' addresses when every route is ready.

    Raises ValueError if a door cannot be opened, and whatever `loading` raises.
    """
    signals = _Signals()
    opened: list[Door] = []
    try:
        addresses: list[str] = []
        for door in doors:
            addresses.append(await door.start())
            opened.append(door)
        on_open(addresses)
        await _first_of(_load(loading, routes, doors), signals.first.wait(), _failure_of(routes))
        loaded = routes.loaded
        if loaded and not signals.first.is_set():
            announce(addresses)
            await _first_of(signals.first.wait(), _failure_of(routes))
        routes.start_draining()
        await asyncio.gather(*(door.update() for door in doors))
        await _first_of(routes.drain(drain_seconds), signals.second.wait())
        await routes.drain(0)
    finally:
        at_once = signals.second.is_set()
        await asyncio.gather(*(door.stop(0 if at_once else _LAST_WORDS) for door in opened))
        signals.restore()
    if isinstance(routes.failure, DeviceLostError):
        return FAILED  # The job has said it.
    if routes.failure is not None:
        _log.error("the engine has failed", exc_info=routes.failure)
        return FAILED
    if at_once:
        return INTERRUPTED  # The device may be what hangs: it is not waited for.
    for service in routes.services:
        await asyncio.to_thread(service.engine.close)
    return 0 if loaded or signals.received is signal.SIGTERM else INTERRUPTED


class _Signals:
    """The first and the second SIGTERM or SIGINT, as events of the running loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.received: signal.Signals | None = None
        """The first one."""
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._receive, number)

    def restore(self) -> None:
        """Signals have their usual effect again."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _receive(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received = number
            self.first.set()
        else:
            self.second.set()


async def _load(loading: Iterable[Service], routes: Routes, doors: Sequence[Door]) -> None:
    """Open each route when its service is there. Raises what the loading raises."""
    event_loop = asyncio.get_running_loop()
    loaded: asyncio.Queue[Service | BaseException | None] = asyncio.Queue()

    def post(item: Service | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # The event loop is closed: the process is about to leave.
            event_loop.call_soon_threadsafe(loaded.put_nowait, item)

    def work() -> None:
        try:
            for service in loading:
                post(service)
            post(None)
        except BaseException as error:  # Raised again where the queue is read.
            post(error)

    threading.Thread(target=work, name="jaxserve-loading", daemon=True).start()
    while (item := await loaded.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        routes.open(item)
        await asyncio.gather(*(door.update() for door in doors))


async def _failure_of(routes: Routes) -> None:
    """Return when an engine has failed. Its streams learn that at once; the process may a moment later."""
    while routes.failure is None:
        await asyncio.sleep(_FAILURE_POLL)


async def _first_of(*waits: Awaitable[object]) -> None:
    """Wait for one of several things, and give up on the others. Raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
