"""Which modules of a checkpoint are quantised, by its config, and their tensors in its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxserve.weights.layout import Part
from jaxserve.weights.quantised.compressed_tensors import METHOD, Group, compressed_groups, matches
from jaxserve.weights.quantised.gptq import awq_scheme, gptq_scheme
from jaxserve.weights.quantised.plain_types import fp8_scheme
from jaxserve.weights.quantised.scheme import FLOATS, Expected, Matrix, Scheme
from jaxserve.weights.settings import Settings
from jaxserve.weights.tensors import StoredTensor

_SCHEMES = {"awq": awq_scheme, "gptq": gptq_scheme, "fp8": fp8_scheme}
_WEIGHT = ".weight"
_KV_SCALE = re.compile(r".*\.self_attn\.[qkv]_scale")

# What tools note of how they arrived at the numbers, or how they load them. The file says which modules they
# rounded.
_NOTES = (
    "act_group_aware",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_percent",
    "dataset",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "pad_token_id",
    "quantizer",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "max_input_len",
    "backend",
    "mse",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "scale_fmt",
    "dequantize",
)


@dataclass(frozen=True)
class StoredModule:
    """A module's weight as it lies in a checkpoint: a part of a parameter."""

    name: str
    scheme: Scheme
    shape: tuple[int, int]
    tensors: Mapping[str, StoredTensor]
    """By the last words of their names."""

    @property
    def scale_encoding(self) -> str:
        return self.tensors[self.scheme.suffixes[1]].encoding.name

    def read(self) -> Matrix:
        """Raises ValueError, naming the tensor, for numbers that contradict the scheme."""
        found = {suffix: tensor.read() for suffix, tensor in self.tensors.items()}
        try:
            return self.scheme.read(found, self.shape)
        except ValueError as error:
            file = next(iter(self.tensors.values())).file
            raise ValueError(f"{file}: tensor {self.name}.{error}") from error


@dataclass(frozen=True)
class QuantisedModules:
    """What a `quantization_config` says of a checkpoint's modules."""

    groups: tuple[Group, ...]
    plain: tuple[str, ...] = ()
    """Modules that are not quantised: their names, parts of them between dots, or patterns after `re:`."""
    strict: bool = False
    """Whether that is all; otherwise a module that has a plain weight is not quantised either."""
    kv_scales: bool = False
    """Whether there may be scales for a quantised cache. They are not used."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What of it is not followed, in words."""

    def scheme_of(self, parameter: str, part: Part, tensors: Mapping[str, StoredTensor]) -> Scheme | None:
        """That of a stored part of a parameter; None where it is a plain tensor."""
        if parameter == "embed" or len(part.shape) != 2 or not part.tensor.endswith(_WEIGHT):
            return None
        module = part.tensor.removesuffix(_WEIGHT)
        scheme = next((group.scheme for group in self.groups if group.takes(module)), None)
        if scheme is None or self._is_listed_plain(module):
            return None
        if not self.strict and _has_plain_weight(part.tensor, scheme.main(module), tensors):
            return None
        return scheme

    def tolerates(self, tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> bool:
        """Whether a tensor that no parameter has may be there: a cache's scale, or a bias that is zero."""
        if self.kv_scales and _KV_SCALE.fullmatch(tensor.name):
            return True
        module, _, suffix = tensor.name.rpartition(".")
        # Early tools of GPTQ gave every module a bias.
        return suffix == "bias" and f"{module}.qweight" in tensors and not np.any(tensor.read())

    def _is_listed_plain(self, module: str) -> bool:
        if matches(module, self.plain):
            return True
        return not self.strict and any(f".{name}." in f".{module}." for name in self.plain)


def _has_plain_weight(weight: str, values: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether there is a weight of floats, and no values of a quantised one beside it."""
    found = tensors.get(weight)
    return found is not None and found.encoding.name in FLOATS and (values == weight or values not in tensors)


def read_quantisation(config: Path) -> QuantisedModules | None:
    """What the `quantization_config` in a config.json says; None where there is none.

    Raises ValueError, naming file, key and value, for a method, a size or a layout that is not read.
    """
    settings = Settings.from_json(config).section("quantization_config")
    if settings is None:
        return None
    method = settings.choice("quant_method", (*_SCHEMES, METHOD))
    if method == METHOD:
        return _compressed(settings)
    scheme = _SCHEMES[method](settings)
    plain = _names(settings, "modules_to_not_convert") + _names(settings, "ignored_layers")
    plain += _skipped(settings)
    settings.insist({"modules_to_convert": None, "expert_dtype": "fp8", "pack_dtype": "int32"})
    for key in _NOTES:
        settings.get(key)
    settings.refuse_unread("absent: what it asks of the numbers is not known here")
    return QuantisedModules((Group(("Linear",), scheme),), plain, notes=_notes((scheme,)))


def find_module(path: Path, part: Part, scheme: Scheme, tensors: Mapping[str, StoredTensor]) -> StoredModule:
    """The tensors of a module that is quantised.

    Raises ValueError, naming the tensor and what was expected, for one that is missing or wrong.
    """
    module = part.tensor.removesuffix(_WEIGHT)
    outputs, inputs = part.shape
    try:
        expected = scheme.tensors((outputs, inputs))
    except ValueError as error:
        raise ValueError(f"{path}: tensor {scheme.main(module)} {error}") from error
    found = {
        suffix: find_tensor(path, f"{module}.{suffix}", what, tensors) for suffix, what in expected.items()
    }
    return StoredModule(module, scheme, (outputs, inputs), found)


def find_tensor(
    path: Path, name: str, expected: Expected, tensors: Mapping[str, StoredTensor]
) -> StoredTensor:
    """Raises ValueError, naming the tensor and what was expected, where it is missing or wrong."""
    found = tensors.get(name)
    shapes = " or ".join(map(str, expected.shapes))
    if found is None:
        raise ValueError(f"{path}: tensor {name} is missing, expected with shape {shapes}")
    if found.shape not in expected.shapes:
        raise ValueError(f"{found.file}: tensor {name} has shape {found.shape}, expected {shapes}")
    if found.encoding.name not in expected.encodings:
        supported = ", ".join(expected.encodings)
        raise ValueError(
            f"{found.file}: tensor {name} has type {found.encoding.name}; supported: {supported}"
        )
    return found


def _compressed(settings: Settings) -> QuantisedModules:
    groups = compressed_groups(settings)
    kv = settings.get("kv_cache_scheme") is not None
    ignored = _names(settings, "ignore")
    settings.refuse_unread("absent: what it asks of the numbers is not known here")
    notes = _notes(tuple(group.scheme for group in groups))
    if kv:
        notes += ("kv_cache_scheme and its scales are not used: the pool has its own format",)
    return QuantisedModules(groups, ignored, strict=True, kv_scales=kv, notes=notes)


def _notes(schemes: tuple[Scheme, ...]) -> tuple[str, ...]:
    static = any("input_scale" in scheme.suffixes for scheme in schemes)
    return ("input_scale is not used: activations have scales as they come, or none",) if static else ()


def _names(settings: Settings, key: str) -> tuple[str, ...]:
    names = settings.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        settings.refuse(key, "a list of names")
    return tuple(names)


def _skipped(settings: Settings) -> tuple[str, ...]:
    """Modules by pattern, as GPTQ's tools name them: `-:` leaves them plain; others give them other sizes."""
    rules = settings.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(rule.startswith("-:") for rule in rules):
        settings.refuse("dynamic", "patterns that begin with -:")
    return tuple(f"re:{rule[2:]}" for rule in rules)
