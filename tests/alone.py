"""Tests that must not share the machine with others, where several processes run the suite."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def held(file: IO[bytes], operation: int) -> Iterator[None]:
    fcntl.flock(file, operation)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait until a test may run, and keep others from it meanwhile if it must run alone.

    Tests share the `room`. All go through the `door` to it one by one, and who must be alone stands in the
    door until the others have left: without it, two that take turns would never leave together.
    """
    with ExitStack() as files:
        door, room = (files.enter_context((folder / name).open("ab")) for name in ("door", "room"))
        with ExitStack() as inside:
            with held(door, fcntl.LOCK_EX):
                inside.enter_context(held(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
            yield
