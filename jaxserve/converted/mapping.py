"""The arrays of an Orbax checkpoint as they lie in its files: mapped into memory, not read.

OCDBT (tensorstore.dev, "OCDBT Key-Value Store driver") appends values to its data files as they are, and a
chunk that nothing compresses is a row-major array. An index beside the checkpoint says where each chunk is.
So an array on CPU is the file's own memory, which the system's cache holds once for all processes, and one
on another device is copied from there. Neither Orbax nor tensorstore is needed to start.
"""

from __future__ import annotations

import itertools
import json
import mmap
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_ARRAY = ".zarray"
_ALIGNED = "aligned"
"""File in a checkpoint's folder, for chunks that begin elsewhere in the store's own."""
_ALIGNMENT = 64
"""Bytes: an array that does not begin at a multiple of them XLA copies before it is used on CPU."""
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
_PAGE_BYTES = mmap.PAGESIZE


def index_file(folder: Path) -> Path:
    """Where the index of an Orbax checkpoint lies: beside its folder."""
    return folder.with_name(f"{folder.name}.json")


def write_index(folder: Path) -> None:
    """Note where the arrays of a checkpoint lie, whose chunks are not compressed.

    The store puts records of its own among them wherever it is at the time, so that which chunks begin at
    odd places changes from one writing to the next; those are written once more, to begin where they should.
    """
    arrays: dict[str, dict[str, Any]] = {}
    places: dict[str, Any] = {}
    for key, place in _values(folder):
        array, _, chunk = key.rpartition("/")
        if chunk == _ARRAY:
            described = json.loads(bytes.fromhex(place))
            arrays[array] = {name: described[name] for name in ("dtype", "shape", "chunks")}
        else:
            places[key] = place
    for key, place in places.items():
        array, _, chunk = key.rpartition("/")
        arrays[array].setdefault("places", {})[chunk] = place
    _align(folder, arrays)
    index_file(folder).write_text(json.dumps(arrays), encoding="utf-8")


def _align(folder: Path, arrays: dict[str, dict[str, Any]]) -> None:
    """Copy the chunks of an index that begin elsewhere into a file where they do not, and name it there."""
    chunks = [
        (array, chunk, place)
        for array in arrays.values()
        for chunk, place in array.get("places", {}).items()
        if not isinstance(place, str) and place[1] % _ALIGNMENT
    ]
    if not chunks:
        return
    with (folder / _ALIGNED).open("wb") as aligned:
        for array, chunk, (name, offset) in chunks:
            num_bytes = prod(array["chunks"]) * _dtype(array).itemsize
            aligned.seek(-(-aligned.tell() // _ALIGNMENT) * _ALIGNMENT)
            array["places"][chunk] = (_ALIGNED, aligned.tell())
            aligned.write(np.memmap(folder / name, np.uint8, "r", offset, (num_bytes,)).data)


def _dtype(array: dict[str, Any]) -> np.dtype[Any]:
    """Of an array of an index."""
    return np.dtype(_DTYPES.get(array["dtype"], array["dtype"]))


def _values(folder: Path) -> Iterator[tuple[str, Any]]:
    """Keys of a key-value store, and each one's file and offset, or in hexadecimal its few bytes."""
    import tensorstore  # Takes a sixth of a second, which starting from the checkpoint does without.

    store = tensorstore.KvStore.open(f"file://{folder}/").result()
    dump = tensorstore.ocdbt.dump
    nodes = [dump(store).result()["versions"][-1]["root"]["location"]]
    while nodes:
        for entry in dump(store, nodes.pop()).result()["entries"]:
            if "location" in entry:
                nodes.append(entry["location"])
            elif "inline_value" in entry:
                yield entry["key"].decode(), entry["inline_value"].hex()
            else:
                _, base, path, offset, _ = entry["indirect_value"].split(":")
                yield entry["key"].decode(), (base + path, int(offset))


class MappedCheckpoint:
    """The arrays of one Orbax checkpoint, by their names in it, each a stack of members."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError, naming the file, for an index that is not one."""
        self._folder = folder
        self._files: dict[str, np.ndarray] = {}
        try:
            self._arrays = json.loads(index_file(folder).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{index_file(folder)} is no index of a checkpoint: {error}") from error

    def member(self, name: str, number: int, shape: Sequence[int]) -> np.ndarray:
        """One of a stack, read-only: a part of the mapped file if it is one chunk, and else a copy.

        Raises ValueError, naming the array, if it has another shape.
        """
        described = self._arrays.get(name)
        stored = tuple(described["shape"][1:]) if described else None
        if described is None or stored != tuple(shape):
            raise ValueError(f"{self._folder}: array {name} has shape {stored}, expected {tuple(shape)}")
        dtype = _dtype(described)
        chunk = tuple(described["chunks"])
        if chunk == (1, *shape):
            found = self._chunk(described, (number,) + (0,) * len(shape), dtype)
            return np.zeros(shape, dtype) if found is None else found[0]
        array = np.zeros(shape, dtype)
        counts = [-(-size // step) for size, step in zip(shape, chunk[1:], strict=True)]
        for place in itertools.product(*map(range, counts)):
            found = self._chunk(described, (number, *place), dtype)
            if found is not None:
                corner = tuple(
                    slice(i * step, (i + 1) * step) for i, step in zip(place, chunk[1:], strict=True)
                )
                part = array[corner]
                part[...] = found[0][tuple(map(slice, part.shape))]
        return array

    def _chunk(
        self, described: dict[str, Any], place: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.ndarray | None:
        """A chunk by its numbers along the axes; None where it was not written, being zero."""
        at = described.get("places", {}).get(".".join(map(str, place)))
        shape = described["chunks"]
        if at is None:
            return None
        if isinstance(at, str):
            return np.frombuffer(bytes.fromhex(at), dtype).reshape(shape)
        file, offset = at
        return self._file(file)[offset : offset + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def _file(self, name: str) -> np.ndarray:
        if name not in self._files:
            with (self._folder / name).open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_WILLNEED"):  # All of it will be: the system may read ahead as it likes.
                mapping.madvise(mmap.MADV_WILLNEED)
            self._files[name] = np.frombuffer(mapping, np.uint8)
        return self._files[name]


def fetch(array: np.ndarray) -> np.ndarray:
    """The same array, once all of it is in memory: what is mapped is read when it is first looked at."""
    array.reshape(-1).view(np.uint8)[::_PAGE_BYTES].max(initial=0)
    return array
