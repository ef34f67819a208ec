"""Tensors as they lie in files, and how one is read into a view of a parameter."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Elements decoded at a time. Dequantising makes several temporaries of this many float32: here they stay in
# the cache and in memory that malloc keeps, and numpy's cost per call has faded. From 128 Ki on, malloc
# returns each to the system: SmolLM2 then takes seven times the page faults, and twice the time.
_SLAB = 1 << 16


@dataclass(frozen=True)
class Encoding:
    """How numbers are stored: blocks of `block_size` elements in `block_bytes` bytes each."""

    name: str
    block_size: int
    block_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    """From whole blocks as flat uint8 to their elements, flat."""
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    """Of the decoded elements."""


def _plain(name: str, dtype: Any) -> Encoding:
    dtype = np.dtype(dtype)
    return Encoding(name, 1, dtype.itemsize, lambda raw: raw.view(dtype), dtype)


def _quantised(kind: GGMLQuantizationType) -> Encoding:
    # One long row: gguf works through its argument in groups of rows, which are small for narrow matrices.
    def decode(raw: np.ndarray) -> np.ndarray:
        return dequantize(raw.reshape(1, -1), kind).reshape(-1)

    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    return Encoding(kind.name, block_size, block_bytes, decode)


PLAIN_ENCODINGS: Mapping[str, Encoding] = {
    "F32": _plain("F32", np.float32),
    "F16": _plain("F16", np.float16),
    "BF16": _plain("BF16", ml_dtypes.bfloat16),
}
PART_ENCODINGS: Mapping[str, Encoding] = {
    "F8_E4M3": _plain("F8_E4M3", ml_dtypes.float8_e4m3fn),
    "I8": _plain("I8", np.int8),
    "I32": _plain("I32", np.int32),
    "I64": _plain("I64", np.int64),
}
"""What tensors hold that are numbers of a model only together with others: see `weights.quantised`."""
QUANTISED_ENCODINGS: Mapping[str, Encoding] = {
    name: _quantised(GGMLQuantizationType[name])
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` bytes into `file`, row-major, in the given encoding."""

    file: Path
    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.encoding.block_size * self.encoding.block_bytes

    def check(self, file_size: int) -> None:
        """Raises ValueError where rows are not whole blocks, or the file ends before the tensor does."""
        if self.shape and self.shape[-1] % self.encoding.block_size:
            raise ValueError(
                f"{self.file}: tensor {self.name} has rows of {self.shape[-1]} elements, expected a multiple "
                f"of {self.encoding.block_size} for {self.encoding.name}"
            )
        end = self.offset + self.num_bytes
        if end > file_size:
            raise ValueError(
                f"{self.file}: truncated: tensor {self.name} ends at byte {end}, the file at {file_size}"
            )

    def read(self) -> np.ndarray:
        """A new array of all elements, in the type that they decode to."""
        array = np.empty(self.shape, self.encoding.dtype)
        self.read_into(array)
        return array

    def read_raw(self) -> np.ndarray:
        """All bytes, flat uint8, as they are stored."""
        with FileIO(self.file) as file:
            file.seek(self.offset)
            return self._read_bytes(file, self.num_bytes)

    def read_into(self, view: np.ndarray, wanted: np.ndarray | None = None) -> None:
        """Reads elements, in stored order, into a view of as many as there are, strided or not, of any type.

        Args:
            view: where they go.
            wanted: bool of its shape, which of them must be there then; others are left out as far as rows
                and blocks allow, in the file and in the view. By default all.

        The file is read, not mapped: pages of a mapping would count as resident beside the parameters.
        """
        with FileIO(self.file) as file:
            file.seek(self.offset)
            self._read_slabs(file, view, wanted)

    def _read_slabs(self, file: FileIO, view: np.ndarray, wanted: np.ndarray | None) -> None:
        """Cuts a view along its first axis until the pieces are slabs; their file order is the view's."""
        if wanted is not None and not wanted.any():
            self._skip(file, view.size)
            return
        if wanted is not None and not wanted.all():
            self._read_wanted(file, view, wanted)
            return
        if view.size <= _SLAB or view.ndim == 1:
            view[...] = self._read_elements(file, view.size).reshape(view.shape)
            return
        rows = max(1, _SLAB * len(view) // view.size)
        for first in range(0, len(view), rows):
            piece = view[first : first + rows]
            self._read_slabs(file, piece[0] if len(piece) == 1 else piece, None)

    def _read_wanted(self, file: FileIO, view: np.ndarray, wanted: np.ndarray) -> None:
        """A view of which a part is wanted: whole rows, or of a single one what lies between the ends."""
        block = self.encoding.block_size
        if view.ndim > 1 and view[0].size % block == 0:
            for row, of_row in zip(view, wanted, strict=True):
                self._read_slabs(file, row, of_row)
            return
        if view.ndim > 1:
            view[...] = self._read_elements(file, view.size).reshape(view.shape)
            return
        places = np.flatnonzero(wanted)
        first, end = places[0] // block * block, -(-(places[-1] + 1) // block) * block
        self._skip(file, first)
        view[first:end] = self._read_elements(file, end - first)
        self._skip(file, view.size - end)

    def _skip(self, file: FileIO, count: int) -> None:
        file.seek(int(count) // self.encoding.block_size * self.encoding.block_bytes, os.SEEK_CUR)

    def _read_elements(self, file: FileIO, count: int) -> np.ndarray:
        return self.encoding.decode(
            self._read_bytes(file, count // self.encoding.block_size * self.encoding.block_bytes)
        )

    def _read_bytes(self, file: FileIO, count: int) -> np.ndarray:
        raw = np.empty(count, np.uint8)
        filled = 0
        while filled < raw.size:
            received = file.readinto(raw.data[filled:])
            if not received:
                raise ValueError(
                    f"{self.file}: truncated inside tensor {self.name}, {raw.size - filled} bytes short"
                )
            filled += received
        return raw
