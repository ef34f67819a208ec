"""Keeps Ctrl-C out of the middle of a step, and from being lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """A SIGINT that arrives inside is handled on the way out, where it finds everything in order.

    A KeyboardInterrupt in the middle of a step would leave the loop with a step that nobody collects. On
    any thread but the main one, which is the only one that Python interrupts, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *received: arrived.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[-1])


class _Keeper:
    """A handler of SIGINT that remembers it and has the former handler do what it does."""

    def __init__(self, former: Callable[..., object]) -> None:
        self._former = former
        self._arrived = threading.Event()

    @property
    def arrived(self) -> bool:
        return self._arrived.is_set()

    def check(self) -> None:
        if self.arrived:
            raise KeyboardInterrupt

    def __call__(self, *received: Any) -> None:
        self._arrived.set()
        self._former(*received)


@contextmanager
def interrupts_kept() -> Iterator[Callable[[], None]]:
    """A SIGINT that arrives inside ends the block with KeyboardInterrupt, whatever becomes of the first one.

    Python raises KeyboardInterrupt wherever the main thread happens to be. In a finaliser or a callback of
    the garbage collector, of which JAX has one, it is printed and forgotten; a library may also catch it or
    make another error of it. So it is remembered here, and raised again at the end of the block at the
    latest. Yields a function that raises it if one has arrived, for work on any thread to ask now and then;
    a block within another asks about both. On any thread but the main one this does nothing.
    """
    former = signal.getsignal(signal.SIGINT)
    if isinstance(former, _Keeper):
        yield former.check
        return
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield lambda: None
        return
    keeper = _Keeper(former)
    signal.signal(signal.SIGINT, keeper)
    try:
        yield keeper.check
    except Exception as error:
        if keeper.arrived:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, former)
    keeper.check()


def leave_at_once(status: int) -> NoReturn:
    """End the process over a thread that loads or compiles, or waits for a process that is gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # Its reader has gone.
            stream.flush()
    os._exit(status)
