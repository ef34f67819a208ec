"""The header of a GGUF file: its metadata and its tensor table.

gguf's own reader is not used for it: it makes numpy arrays of every token and merge, which takes 5 s for
SmolLM2's 98,000 strings, and this 0.05 s. The format is specified in ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from jaxserve.weights.settings import Settings
from jaxserve.weights.tensors import PLAIN_ENCODINGS, QUANTISED_ENCODINGS, StoredTensor

_ENCODINGS = {**PLAIN_ENCODINGS, **QUANTISED_ENCODINGS}
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8

_NUMBERS: Mapping[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The metadata of a GGUF file as plain Python values, and its tensors by name.

    Raises ValueError for a file that is no GGUF, of an unknown version, truncated, or with a tensor of a
    type that cannot be read.
    """
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path}: empty, expected a GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path)
        num_tensors, num_values = _read_counts(cursor)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.value_type())
        alignment = Settings(metadata, path, "general.").integer("alignment", _DEFAULT_ALIGNMENT)
        tensors = _read_tensors(cursor, num_tensors, alignment)
    for tensor in tensors.values():
        tensor.check(size)
    return metadata, tensors


class _Cursor:
    """Reads values one after another; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.path = path
        self.position = 0
        self._data = data

    def take(self, num_bytes: int) -> bytes:
        start = self.position
        if num_bytes > len(self._data) - start:
            raise ValueError(
                f"{self.path}: truncated: the header needs {num_bytes} bytes at byte {start}, "
                f"the file ends at {len(self._data)}"
            )
        self.position += num_bytes
        return self._data[start : self.position]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self) -> str:
        # Token texts may hold a lone byte of a longer character.
        return self.take(self.u64()).decode("utf-8", errors="surrogateescape")

    def value_type(self) -> GGUFValueType:
        code = self.u32()
        try:
            return GGUFValueType(code)
        except ValueError as error:
            raise ValueError(
                f"{self.path}: unknown metadata type {code} before byte {self.position}"
            ) from error

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is GGUFValueType.ARRAY:
            return self._array(self.value_type(), self.u64())
        return self._numbers(kind, 1)[0]

    def _array(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind is GGUFValueType.STRING:
            return self._texts(count)
        if kind is GGUFValueType.ARRAY:
            return [self.value(kind) for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = _NUMBERS[kind]
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def _texts(self, count: int) -> list[str]:
        """Many strings in one go: vocabularies and merges are most of a header."""
        data, start, unpack = self._data, self.position, struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(count):
                end = start + 8 + unpack(data, start)[0]
                texts.append(data[start + 8 : end].decode("utf-8", errors="surrogateescape"))
                start = end
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{self.path}: truncated inside a list of strings at byte {start}") from error
        self.take(start - self.position)
        return texts


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise ValueError(f"{cursor.path}: starts with {magic!r}, expected b'GGUF'")
    version = cursor.u32()
    if version not in _VERSIONS:
        raise ValueError(f"{cursor.path}: GGUF version {version}; supported: {_VERSIONS}, little-endian")
    return cursor.u64(), cursor.u64()


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, StoredTensor]:
    entries = [_read_entry(cursor) for _ in range(count)]
    # Offsets in the table count from the first aligned byte after it.
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"{cursor.path}: tensor {name} is listed twice")
        if kind not in _ENCODINGS:
            raise ValueError(
                f"{cursor.path}: tensor {name} has type {kind}; supported: {', '.join(_ENCODINGS)}"
            )
        tensors[name] = StoredTensor(cursor.path, name, shape, _ENCODINGS[kind], start + offset)
    return tensors


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    """Name, shape with the slowest axis first (the file has it last), type name and offset."""
    name = cursor.text()
    num_dimensions = cursor.u32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise ValueError(
            f"{cursor.path}: tensor {name} has {num_dimensions} dimensions, at most {_MAX_DIMENSIONS}"
        )
    shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]
    code = cursor.u32()
    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    return name, shape, known.get(code, f"number {code}"), cursor.u64()
