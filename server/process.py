"""The life of a serving process: open the doors, wait for a signal or a failure, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from jaxserve.async_engine import Engine
from server.core import Service

FAILED = 1
STOPPED_AT_ONCE = 130

_log = logging.getLogger("jaxserve.server")

_FAILURE_POLL = 0.05
_LAST_WORDS = 2.0
"""Seconds for statuses to reach their clients after a failure, and for answers that have just ended."""


class Door(Protocol):
    """A way into the service."""

    async def start(self) -> str:
        """Open; return the address. Raises ValueError if that cannot be had."""
        ...

    async def leave(self) -> None:
        """Tell who asks for readiness that no new request is welcome."""
        ...

    async def stop(self, grace: float) -> None:
        """Close; what is still open after `grace` seconds is cut off."""
        ...


async def serve(
    service: Service,
    doors: Sequence[Door],
    *,
    drain_seconds: float,
    announce: Callable[[Sequence[str]], object],
) -> int:
    """Serve until a signal or a failure of the engine; return the exit status.

    SIGTERM or SIGINT drains: new requests are refused as UNAVAILABLE, open ones have `drain_seconds` to end,
    the status is 0. A second signal stops at once with 130. A failure of the engine ends every stream as
    INTERNAL, with status 1.

    Args:
        service: its engine is closed at the end, unless it has failed or is not waited for.
        doors: opened in this order.
        drain_seconds: after which open requests end as UNAVAILABLE.
        announce: called with the doors' addresses when all are open.

    Raises ValueError if a door cannot be opened.
    """
    engine, signals = service.engine, _Signals()
    try:
        announce([await door.start() for door in doors])
        await _first_of(signals.first.wait(), _failure_of(engine))
        service.start_draining()
        if engine.failure is None:
            await asyncio.gather(*(door.leave() for door in doors))
            await _first_of(service.drain(drain_seconds), signals.second.wait(), _failure_of(engine))
        if engine.failure is None:
            await service.drain(0)
    finally:
        at_once = signals.second.is_set()
        await asyncio.gather(*(door.stop(0 if at_once else _LAST_WORDS) for door in doors))
        signals.restore()
    if engine.failure is not None:
        _log.error("the engine has failed", exc_info=engine.failure)
        return FAILED
    if at_once:
        return STOPPED_AT_ONCE  # The device may be what hangs: it is not waited for.
    await asyncio.to_thread(engine.close)
    return 0


class _Signals:
    """The first and the second SIGTERM or SIGINT, as events of the running loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._receive)

    def restore(self) -> None:
        """Signals have their usual effect again."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _failure_of(engine: Engine) -> None:
    """Return when the engine has failed. Its streams learn that at once; the process may a moment later."""
    while engine.failure is None:
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
