"""The tensor table of a folder of safetensors files, alone or sharded with an index.

Headers are parsed here because tensors are read in slabs at their offsets (see tensors.py), which the
safetensors package does not give away. The format: 8 bytes of length, a JSON header, the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from jaxserve.weights.settings import Settings, shorten
from jaxserve.weights.tensors import PART_ENCODINGS, PLAIN_ENCODINGS, StoredTensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ENCODINGS = {**PLAIN_ENCODINGS, **PART_ENCODINGS}
_MAX_HEADER = 100_000_000


def read_safetensors_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder by name.

    Raises ValueError where there is no model file, a shard or a tensor of the index is missing, or a file is
    truncated or malformed.
    """
    if not (folder / _INDEX).exists():
        if not (folder / _SINGLE).exists():
            found = sorted(
                path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf")
            )
            raise ValueError(f"{folder}: expected {_SINGLE} or {_INDEX}, found {found or 'no weights'}")
        return read_safetensors(folder / _SINGLE)
    shard_of = _read_index(folder / _INDEX)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        if not (folder / shard).exists():
            raise ValueError(f"{folder / shard}: missing, but named in {_INDEX}")
        for name, tensor in read_safetensors(folder / shard).items():
            if name in tensors:
                raise ValueError(f"{tensor.file}: tensor {name} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise ValueError(f"{folder / shard}: tensor {name} is missing, but {_INDEX} says it is there")
    return tensors


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file by name; raises ValueError where it is truncated or malformed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path}: truncated, or no safetensors file: {size} bytes, a header of {length}")
        header = _parse_header(path, file.read(length))
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    for tensor in tensors.values():
        tensor.check(size)
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    section = Settings.from_json(path).get("weight_map")
    if not isinstance(section, dict) or not section:
        raise ValueError(f"{path}: weight_map is {shorten(section)}, expected tensor names and their files")
    for name, shard in section.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(
                f"{path}: tensor {name} is in {shard!r}, expected the name of a file beside the index"
            )
    return section


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: the safetensors header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the safetensors header is not an object")
    header.pop("__metadata__", None)
    return header


def _stored(path: Path, name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, end)):
            raise TypeError("negative or no integer")
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: tensor {name} has the malformed entry {shorten(entry)}") from error
    if dtype not in _ENCODINGS:
        raise ValueError(f"{path}: tensor {name} has type {dtype}; supported: {', '.join(_ENCODINGS)}")
    encoding = _ENCODINGS[dtype]
    if end - start != prod(shape) * encoding.block_bytes:
        raise ValueError(f"{path}: tensor {name} of shape {shape} and type {dtype} spans {end - start} bytes")
    return StoredTensor(path, name, shape, encoding, data_start + start)
