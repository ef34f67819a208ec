"""Arrays in pages of 2 MiB, where Linux has such and the device is the CPU.

A step reads all weights and much of the KV pool. Of pages of 4 KiB it visits more than a processor keeps
addresses of, and in a virtual machine looking one up costs more than reading what is there: int8 products
take twice as long.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any

import jax
import numpy as np

PAGE = 2**21
_RESERVED = 2**28
"""Bytes of a mapping, of which only what is written takes memory."""
_ALIGNMENT = 64
"""Bytes; arrays that begin elsewhere would be copied to be used."""
_SMALLEST = 2**16
"""Bytes of an array that is worth it."""
_MADV_COLLAPSE = 25  # Since Linux 6.1; older ones do it when they come to it.


def is_available() -> bool:
    """Whether this is of use here."""
    return sys.platform == "linux" and jax.default_backend() == "cpu"


class HugePages:
    """Memory for arrays that are to stay, and from then on only to be read."""

    def __init__(self) -> None:
        self._free = np.empty((0,), np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of zeros, in huge pages unless it is small or there are none.

        `jax.device_put` makes it one of jax's where it lies, of all types of a byte and more.
        """
        dtype = np.dtype(dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _SMALLEST or (self._free.size < num_bytes and not self._reserve(num_bytes)):
            return np.zeros(shape, dtype)
        array = self._free[:num_bytes].view(dtype).reshape(shape)
        self._free = self._free[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return array

    def keep(self, array: np.ndarray | jax.Array) -> jax.Array:
        """The same array, there."""
        kept = self.empty(array.shape, array.dtype)
        kept[...] = np.asarray(array)
        return jax.device_put(kept)

    def _reserve(self, num_bytes: int) -> bool:
        size = max(_RESERVED, -(-num_bytes // PAGE) * PAGE) + PAGE
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # No memory, or a kernel without.
            return False
        mapped = np.frombuffer(mapping, np.uint8)
        self._free = mapped[-mapped.ctypes.data % PAGE :]
        return True


def advise(tree: Any) -> None:
    """Have the kernel put arrays that are written in place into huge pages, as far as it can."""
    libc = ctypes.CDLL(None)
    for array in jax.tree.leaves(tree):
        if array.nbytes < PAGE:
            continue
        address = array.unsafe_buffer_pointer()
        first, end = -(-address // PAGE) * PAGE, (address + array.nbytes) // PAGE * PAGE
        for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(max(end - first, 0)), advice)
