"""An opened checkpoint: what model it is, and its parameters one at a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.config import FloatFormat, ModelConfig
from jaxserve.model.parameters import ParameterInfo, model_parameters
from jaxserve.weights.gguf_config import ROPE_FACTORS, read_gguf_config
from jaxserve.weights.gguf_file import read_gguf
from jaxserve.weights.hf_config import read_hf_config
from jaxserve.weights.layout import Naming, parts_of
from jaxserve.weights.quantised import QuantisedModules, StoredMatrix, read_quantisation
from jaxserve.weights.quantised.modules import StoredModule, find_module, find_tensor
from jaxserve.weights.quantised.parameter import Source, read_exactly, read_widened
from jaxserve.weights.quantised.scheme import Expected
from jaxserve.weights.safetensors_folder import read_safetensors_folder
from jaxserve.weights.stored_weights import StoredWeights, stored_weights
from jaxserve.weights.tensors import PLAIN_ENCODINGS, QUANTISED_ENCODINGS, StoredTensor

_DTYPES: Mapping[FloatFormat, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

# Tensors that a checkpoint may hold beside its parameters. Rotary frequencies follow from the config.
_REDUNDANT = re.compile(r".*rotary_emb\.inv_freq")
# Some tools store the head of a tied model too. The config decides, as in transformers: it is not read.
_TIED_HEAD = "lm_head.weight"

Region = tuple[slice, ...]
"""A part of an array, for each axis from where to where."""
RegionOf = Callable[[str, tuple[int, ...]], Region | None]
"""The part that is needed of a parameter with this name and shape; None for all."""

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
    stored: StoredWeights | None
    """How its weights are quantised; None where all of them are plain numbers."""
    _naming: Naming
    _sources: Mapping[str, tuple[Source, ...]]

    @property
    def natural_format(self) -> FloatFormat:
        """The narrower of the formats that keeps every plain number: bfloat16 where all matrices are."""
        matrices = (
            source
            for sources in self._sources.values()
            for _, source in sources
            if isinstance(source, StoredTensor) and len(source.shape) > 1
        )
        return "bfloat16" if all(tensor.encoding.name == "BF16" for tensor in matrices) else "float32"

    def read(
        self, compute_format: FloatFormat, region_of: RegionOf = lambda name, shape: None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The parameters of `model_parameters(config)`, in its order and shapes, as they are asked for.

        Each is a new C-contiguous array of the compute format, or of float32 where the declaration keeps
        full precision; those that are quantised are widened. One is in memory at a time, apart from those
        that the caller keeps. Of one for which `region_of` names a part, from its name and shape, only that
        is read, as far as rows allow: the rest is undefined, and takes no memory where it is large.

        Raises ValueError for an unknown format, where a file has become shorter since it was opened, and
        where the numbers of quantised tensors contradict the config.
        """
        dtype = _dtype(compute_format)
        infos = model_parameters(self.config)
        return (
            (name, self._read_plain(name, info, dtype, region_of(name, info.shape))) for name, info in infos
        )

    def read_stored(
        self, compute_format: FloatFormat, region_of: RegionOf = lambda name, shape: None
    ) -> Iterator[tuple[str, np.ndarray | StoredMatrix]]:
        """The same, but parameters that a format holds exactly are in it: those of `stored.formats`.

        Of these all is read, or nothing where nothing of one is needed.
        """
        dtype = _dtype(compute_format)
        formats = self.stored.formats if self.stored else {}

        def read(name: str, info: ParameterInfo) -> np.ndarray | StoredMatrix:
            region = region_of(name, info.shape)
            if name in formats:
                return read_exactly(info, formats[name], () if _is_empty(region) else self._sources[name])
            return self._read_plain(name, info, dtype, region)

        return ((name, read(name, info)) for name, info in model_parameters(self.config))

    def _read_plain(
        self, name: str, info: ParameterInfo, dtype: np.dtype[Any], region: Region | None = None
    ) -> np.ndarray:
        parameter = np.empty(info.shape, np.float32 if info.full_precision else dtype)
        if _is_empty(region):
            return parameter
        wanted = None if region is None else _inside(info.shape, region)
        read_widened(parameter, self._sources[name], wanted)
        if self._naming.norm_offset and name.endswith("norm"):
            parameter += self._naming.norm_offset
        return parameter


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder in Hugging Face layout or a GGUF file, and checks its tensors against its config.

    Raises ValueError, naming the file and what was expected, for an unknown architecture, an unsupported
    setting, encoding or quantisation, a missing or surplus tensor, a wrong shape, or a truncated file.
    """
    metadata = quantised = None
    if path.is_dir():
        config, naming = read_hf_config(path)
        quantised = read_quantisation(path / "config.json")
        tensors = read_safetensors_folder(path)
    elif path.is_file():
        metadata, tensors = read_gguf(path)
        config, naming = read_gguf_config(path, metadata, tensors)
    else:
        raise ValueError(f"{path}: no such file or folder")
    sources = _find_sources(path, config, naming, tensors, quantised)
    _refuse_surplus(config, sources, tensors, quantised)
    stored = stored_weights(config, sources, quantised)
    fingerprint = _fingerprint(config, tensors, quantised)
    return Checkpoint(path, config, metadata, fingerprint, stored, naming, sources)


def _is_empty(region: Region | None) -> bool:
    return region is not None and any(cut.start == cut.stop for cut in region)


def _inside(shape: tuple[int, ...], region: Region) -> np.ndarray:
    """Of an array of this shape, which elements lie in a region; as large as the axes that are cut."""
    inside = np.ones((1,) * len(shape), np.bool_)
    for axis, (size, cut) in enumerate(zip(shape, region, strict=True)):
        if range(size)[cut] != range(size):
            along = np.zeros(size, np.bool_)
            along[cut] = True
            inside = inside & along.reshape(-1, *(1,) * (len(shape) - axis - 1))
    return np.broadcast_to(inside, shape)


def _dtype(compute_format: FloatFormat) -> np.dtype[Any]:
    if compute_format not in _DTYPES:
        raise ValueError(f"compute_format {compute_format!r} is not one of {', '.join(_DTYPES)}")
    return np.dtype(_DTYPES[compute_format])


def _find_sources(
    path: Path,
    config: ModelConfig,
    naming: Naming,
    tensors: Mapping[str, StoredTensor],
    quantised: QuantisedModules | None,
) -> dict[str, tuple[Source, ...]]:
    """Where each parameter's parts lie, all of them checked."""
    encodings = tuple(PLAIN_ENCODINGS if path.is_dir() else {**PLAIN_ENCODINGS, **QUANTISED_ENCODINGS})

    def find(name: str, info: ParameterInfo) -> Iterator[Source]:
        for part in parts_of(name, info, config, naming):
            scheme = quantised.scheme_of(name, part, tensors) if quantised else None
            if scheme:
                yield part, find_module(path, part, scheme, tensors)
            else:
                yield part, find_tensor(path, part.tensor, Expected.of(part.shape, *encodings), tensors)

    return {name: tuple(find(name, info)) for name, info in model_parameters(config)}


def _refuse_surplus(
    config: ModelConfig,
    sources: Mapping[str, tuple[Source, ...]],
    tensors: Mapping[str, StoredTensor],
    quantised: QuantisedModules | None,
) -> None:
    expected: set[str] = set()
    for _, source in (entry for entries in sources.values() for entry in entries):
        own = source.tensors.values() if isinstance(source, StoredModule) else (source,)
        expected |= {tensor.name for tensor in own}
    for name, tensor in tensors.items():
        if name in expected or _is_redundant(name, config):
            continue
        if quantised is None or not quantised.tolerates(tensor, tensors):
            raise ValueError(f"{tensor.file}: tensor {name} is surplus, no {config.family} model has it")


def _is_redundant(name: str, config: ModelConfig) -> bool:
    if name == ROPE_FACTORS or _REDUNDANT.fullmatch(name):
        return True
    return name == _TIED_HEAD and config.tie_embeddings


def _fingerprint(
    config: ModelConfig, tensors: Mapping[str, StoredTensor], quantised: QuantisedModules | None
) -> str:
    """A cheap hash that tells models apart: two fine-tunes of one model differ in the sampled bytes alone."""
    digest = hashlib.sha256(repr(config).encode())
    if quantised is not None:  # The same bytes are other numbers under another config.
        digest.update(repr((quantised.groups, quantised.plain)).encode())
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
