"""Keeps Ctrl-C out of the middle of a step, and from being lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


@contextmanager
def interrupts_kept() -> Iterator[Callable[[], None]]:
    """A SIGINT that arrives inside ends the block with KeyboardInterrupt, whatever becomes of the first one.

    Python raises KeyboardInterrupt wherever the main thread happens to be. In a finaliser or a callback of
    the garbage collector, of which JAX has one, it is printed and forgotten; a library may also catch it or
    make another error of it. So it is remembered here, and raised again at the end of the block at the
    latest. Yields a function that raises it if one has arrived, for work on any thread to ask now and then.
    On any thread but the main one this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    arrived = threading.Event()

    def check() -> None:
        if arrived.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield check
        return

    def remember(*received: Any) -> None:
        arrived.set()
        handler(*received)

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    except Exception as error:
        if arrived.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
    check()
