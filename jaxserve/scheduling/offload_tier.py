"""Where the contents of pages are kept outside the pool, and how they get there and back.

A tier is a number of slots of one size. The host's memory is one; a disk or another machine can be one too:
it may be slow, lose what it holds, or give back something else, and never makes an answer wrong, because
whoever reads from it checks (`offload.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class TierRead(Protocol):
    """A read that has been started."""

    @property
    def ready(self) -> bool:
        """Whether `take` returns at once."""
        ...

    def take(self) -> list[Bytes | None]:
        """The contents of the slots in their order, None for what cannot be read; waits for them."""
        ...


class PageTier(Protocol):
    """Slots for the pages of one cache group. Called from the loop's thread; errors are OSError."""

    @property
    def num_slots(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    def write(self, slot: int, data: Bytes) -> None:
        """Keep `data` [page_bytes] in the slot. It may be finished later, in order with reads.

        Raises OSError if it is known not to have been kept.
        """
        ...

    def read(self, slots: Sequence[int]) -> TierRead:
        """Start to read what was written last to each slot. Raises OSError if none can be read."""
        ...


class PageRead(Protocol):
    """A copy of pages from the device that has been started."""

    @property
    def ready(self) -> bool:
        """Whether `take` returns at once."""
        ...

    def take(self) -> Bytes:
        """[pages, page_bytes] what the pages held when the copy was started; waits for it."""
        ...


class PageTransfer(Protocol):
    """The device half of moving pages. Everything is in order with the dispatches of steps."""

    def read_pages(self, group: int, pages: Sequence[int]) -> PageRead:
        """Start to copy pages to the host, as every step dispatched so far leaves them."""
        ...

    def write_pages(self, group: int, pages: Sequence[int], data: Bytes) -> None:
        """Start to fill pages with `data` [pages, page_bytes], before any step dispatched from now on."""
        ...


class _Taken:
    """A read that was done at once."""

    ready = True

    def __init__(self, contents: list[Bytes | None]) -> None:
        self._contents = contents

    def take(self) -> list[Bytes | None]:
        return self._contents


class HostMemoryTier:
    """Slots in one array of the host's memory, taken when the tier is made."""

    def __init__(self, num_slots: int, page_bytes: int, memory: npt.NDArray[Any] | None = None) -> None:
        """`memory`: [num_slots, page_bytes] uint8, such as pinned memory of the device's; by default new.

        Raises ValueError for sizes below 1, or memory of another shape or type.
        """
        for name, value in (("num_slots", num_slots), ("page_bytes", page_bytes)):
            if value < 1:
                raise ValueError(f"{name} {value} is out of range: it must be at least 1")
        if memory is None:
            memory = np.zeros((num_slots, page_bytes), np.uint8)
        if memory.shape != (num_slots, page_bytes) or memory.dtype != np.uint8:
            raise ValueError(
                f"memory is {memory.dtype}{list(memory.shape)}; expected uint8[{num_slots}, {page_bytes}]"
            )
        self._memory: Bytes = memory

    @property
    def num_slots(self) -> int:
        return self._memory.shape[0]

    @property
    def page_bytes(self) -> int:
        return self._memory.shape[1]

    def write(self, slot: int, data: Bytes) -> None:
        self._memory[slot] = data

    def read(self, slots: Sequence[int]) -> TierRead:
        return _Taken([self._memory[slot].copy() for slot in slots])
