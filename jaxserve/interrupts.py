"""Keeps Ctrl-C out of the middle of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
