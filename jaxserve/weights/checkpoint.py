"""An opened checkpoint: what model it is, and its parameters one at a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.config import FloatFormat, ModelConfig
from jaxserve.model.parameters import model_parameters
from jaxserve.weights.gguf_config import ROPE_FACTORS, read_gguf_config
from jaxserve.weights.gguf_file import read_gguf
from jaxserve.weights.hf_config import read_hf_config
from jaxserve.weights.layout import Naming, Part, parts_of
from jaxserve.weights.safetensors_folder import read_safetensors_folder
from jaxserve.weights.tensors import StoredTensor

_DTYPES: Mapping[FloatFormat, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

# Tensors that a checkpoint may hold beside its parameters. Rotary frequencies follow from the config.
_REDUNDANT = re.compile(r".*rotary_emb\.inv_freq")
# Some tools store the head of a tied model too. The config decides, as in transformers: it is not read.
_TIED_HEAD = "lm_head.weight"

_SAMPLED_TENSORS = 64
_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk whose tensors have been checked against its config; nothing is loaded yet."""

    path: Path
    """A folder in Hugging Face layout, or a GGUF file."""
    config: ModelConfig
    metadata: Mapping[str, Any] | None
    """All metadata of a GGUF file, tokenizer included, as plain Python values; None for a folder."""
    fingerprint: str
    """Changes with config, file names and sizes, tensor table, or the sampled bytes of the weights."""
    _naming: Naming
    _tensors: Mapping[str, StoredTensor]

    @property
    def natural_format(self) -> FloatFormat:
        """The narrower of the formats that keeps every number: bfloat16 where all matrices are."""
        matrices = (tensor for tensor in self._tensors.values() if len(tensor.shape) > 1)
        return "bfloat16" if all(tensor.encoding.name == "BF16" for tensor in matrices) else "float32"

    def read(self, compute_format: FloatFormat) -> Iterator[tuple[str, np.ndarray]]:
        """The parameters of `model_parameters(config)`, in its order and shapes, as they are asked for.

        Each is a new C-contiguous array of the compute format, or of float32 where the declaration keeps
        full precision. One is in memory at a time, apart from those that the caller keeps.

        Raises ValueError for an unknown format, and where a file has become shorter since it was opened.
        """
        if compute_format not in _DTYPES:
            raise ValueError(f"compute_format {compute_format!r} is not one of {', '.join(_DTYPES)}")
        return self._read(np.dtype(_DTYPES[compute_format]))

    def _read(self, compute_dtype: np.dtype[Any]) -> Iterator[tuple[str, np.ndarray]]:
        for name, info in model_parameters(self.config):
            parameter = np.empty(info.shape, np.float32 if info.full_precision else compute_dtype)
            for part in parts_of(name, info, self.config, self._naming):
                self._tensors[part.tensor].read_into(part.place(parameter))
            if self._naming.norm_offset and name.endswith("norm"):
                parameter += self._naming.norm_offset
            yield name, parameter


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder in Hugging Face layout or a GGUF file, and checks its tensors against its config.

    Raises ValueError, naming the file and what was expected, for an unknown architecture, an unsupported
    setting or encoding, a missing or surplus tensor, a wrong shape, or a truncated file.
    """
    metadata = None
    if path.is_dir():
        config, naming = read_hf_config(path)
        tensors = read_safetensors_folder(path)
    elif path.is_file():
        metadata, tensors = read_gguf(path)
        config, naming = read_gguf_config(path, metadata, tensors)
    else:
        raise ValueError(f"{path}: no such file or folder")
    _check_tensors(path, config, naming, tensors)
    return Checkpoint(path, config, metadata, _fingerprint(config, tensors), naming, tensors)


def _check_tensors(
    path: Path, config: ModelConfig, naming: Naming, tensors: Mapping[str, StoredTensor]
) -> None:
    expected: set[str] = set()
    for part in _all_parts(config, naming):
        found = tensors.get(part.tensor)
        if found is None:
            raise ValueError(f"{path}: tensor {part.tensor} is missing, expected with shape {part.shape}")
        if found.shape != part.shape:
            raise ValueError(
                f"{found.file}: tensor {part.tensor} has shape {found.shape}, expected {part.shape}"
            )
        expected.add(part.tensor)
    for name, tensor in tensors.items():
        if name not in expected and not _is_redundant(name, config):
            raise ValueError(f"{tensor.file}: tensor {name} is surplus, no {config.family} model has it")


def _all_parts(config: ModelConfig, naming: Naming) -> Iterator[Part]:
    for name, info in model_parameters(config):
        yield from parts_of(name, info, config, naming)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    if name == ROPE_FACTORS or _REDUNDANT.fullmatch(name):
        return True
    return name == _TIED_HEAD and config.tie_embeddings


def _fingerprint(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """A cheap hash that tells models apart: two fine-tunes of one model differ in the sampled bytes alone."""
    digest = hashlib.sha256(repr(config).encode())
    for file in sorted({tensor.file for tensor in tensors.values()}):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    ordered = [tensors[name] for name in sorted(tensors)]
    for tensor in ordered:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.encoding.name} {tensor.offset}\n".encode())
    for tensor in ordered[:: -(-len(ordered) // _SAMPLED_TENSORS)]:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset + tensor.num_bytes // 2)
            digest.update(file.read(min(_SAMPLE_BYTES, tensor.num_bytes - tensor.num_bytes // 2)))
    return digest.hexdigest()[:32]
