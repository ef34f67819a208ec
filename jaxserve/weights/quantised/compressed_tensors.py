"""Checkpoints of the compressed-tensors package: groups of modules, each with its scheme."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.weights.quantised.packing import num_words, unpack_words
from jaxserve.weights.quantised.plain_types import PlainTypeScheme, block_sizes
from jaxserve.weights.quantised.scheme import FLOATS, Expected, Matrix, Scheme
from jaxserve.weights.settings import Settings

METHOD = "compressed-tensors"
_PACKED = "pack-quantized"
_PLAIN_TYPES = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = (_PACKED, *_PLAIN_TYPES)

# What the tool notes of how it arrived at the numbers.
_NOTES = ("quantization_status", "global_compression_ratio", "version")
_WEIGHT_NOTES = ("observer", "observer_kwargs", "zp_dtype", "scale_dtype")


@dataclass(frozen=True, kw_only=True)
class PackedScheme(Scheme):
    """Integers counted from 0 up, packed along the inputs, zeros along the outputs."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        zeros = ("weight_zero_point",) if self.zeros else ()
        order = ("weight_g_idx",) if self.permuted else ()
        return ("weight_packed", "weight_scale", "weight_shape", *zeros, *order)

    def tensors(self, shape: tuple[int, int]) -> Mapping[str, Expected]:
        outputs, inputs = shape
        groups = self.num_groups(inputs)
        tensors = {
            "weight_packed": Expected.of((outputs, num_words(inputs, self.bits)), "I32"),
            "weight_scale": Expected.of((outputs, groups), *FLOATS),
            "weight_shape": Expected.of((2,), "I64", "I32"),
            "weight_zero_point": Expected.of((num_words(outputs, self.bits), groups), "I32"),
            "weight_g_idx": Expected.of((inputs,), "I32"),
        }
        return {name: tensors[name] for name in self.suffixes}

    def read(self, found: Mapping[str, np.ndarray], shape: tuple[int, int]) -> Matrix:
        outputs, inputs = shape
        stated = tuple(found["weight_shape"].tolist())
        if stated != shape:
            raise ValueError(f"weight_shape holds {stated}, expected {shape}")
        values = self._counted(unpack_words(found["weight_packed"], self.bits, 1, inputs))
        zeros = None
        if self.zeros:
            zeros = self._counted(unpack_words(found["weight_zero_point"], self.bits, 0, outputs))
        return Matrix(values, found["weight_scale"], zeros, self._group_of(found, self.num_groups(inputs)))

    def _counted(self, numbers: np.ndarray) -> np.ndarray:
        """Eight bits are kept around zero."""
        return numbers if self.bits == 4 else (numbers ^ np.uint8(0x80)).view(np.int8)

    def _group_of(self, found: Mapping[str, np.ndarray], num_groups: int) -> np.ndarray | None:
        if not self.permuted:
            return None
        g_idx = found["weight_g_idx"]
        if np.any((g_idx < 0) | (g_idx >= num_groups)):
            raise ValueError(
                f"weight_g_idx holds {g_idx.min()} to {g_idx.max()}, expected 0 to {num_groups - 1}"
            )
        return g_idx


@dataclass(frozen=True)
class Group:
    """Modules by their names or by what they are, and their scheme."""

    targets: tuple[str, ...]
    scheme: Scheme

    def takes(self, module: str) -> bool:
        return "Linear" in self.targets or matches(module, self.targets)


def matches(module: str, patterns: Sequence[str]) -> bool:
    """Whether a module is named in a list of names and of regular expressions after `re:`."""
    return any(
        re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module
        for pattern in patterns
    )


def compressed_groups(settings: Settings) -> tuple[Group, ...]:
    """The groups of a `quantization_config`, in its order; the first that takes a module counts."""
    if settings.get("transform_config"):
        settings.refuse("transform_config", "absent")
    sparsity = settings.section("sparsity_config")
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        sparsity.refuse("format", "dense")
    for key in _NOTES:
        settings.get(key)
    layout = settings.choice("format", (*_FORMATS, "mixed-precision"))
    sections = settings.section("config_groups")
    names = settings.get("config_groups")
    groups = [
        _group(section, layout) for name in names or () if sections and (section := sections.section(name))
    ]
    if not groups:
        settings.refuse("config_groups", "groups of modules")
    return tuple(groups)


def _group(settings: Settings, layout: str) -> Group:
    targets = settings.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        settings.refuse("targets", "a list of names")
    settings.insist({"output_activations": None})
    layout = settings.choice("format", _FORMATS, layout)
    weights = settings.section("weights")
    if weights is None:
        settings.refuse("weights", "what they are stored as")
    scheme = _packed(weights, settings) if layout == _PACKED else _plain_type(weights, settings)
    settings.refuse_unread("absent: what it asks of the numbers is not known here")
    weights.refuse_unread("absent: what it asks of the numbers is not known here")
    return Group(tuple(targets), scheme)


def _packed(weights: Settings, settings: Settings) -> Scheme:
    _read_common(weights)
    settings.insist({"input_activations": None})
    weights.insist({"block_structure": None})
    weights.choice("type", ("int",))
    bits = weights.integer("num_bits")
    if bits not in (4, 8):
        weights.refuse("num_bits", "4 or 8")
    strategy = weights.choice("strategy", ("group", "channel"))
    order = weights.get("actorder")
    if order not in (None, False, True, "weight", "static", "group"):
        weights.refuse("actorder", "weight, static or group")
    return PackedScheme(
        method=METHOD,
        bits=bits,
        group=weights.integer("group_size") if strategy == "group" else _no_group(weights),
        zeros=not weights.flag("symmetric"),
        # The other orders are gone once the weights have been rounded.
        permuted=order in (True, "group") and strategy == "group",
    )


def _plain_type(weights: Settings, settings: Settings) -> Scheme:
    _read_common(weights)
    weights.insist({"actorder": None})
    kind = weights.choice("type", ("int", "float"))
    weights.insist({"num_bits": 8})
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"))
    zeros = not weights.flag("symmetric")
    if zeros and kind == "float":
        weights.refuse("symmetric", "true with floats")
    block = block_sizes(weights, "block_structure") if strategy == "block" else (0, 0)
    if strategy != "block":
        weights.insist({"block_structure": None})
    group = weights.integer("group_size") if strategy == "group" else _no_group(weights) + block[1]
    rounded, static = _activations(settings)
    return PlainTypeScheme(
        method=METHOD,
        kind="float" if kind == "float" else "int",
        bits=8,
        group=group,
        zeros=zeros,
        int8_rows=rounded and kind == "int" and not zeros and strategy in ("tensor", "channel"),
        strategy=strategy,  # pyright: ignore[reportArgumentType]
        block_outputs=block[0],
        input_scale=static,
    )


def _read_common(weights: Settings) -> None:
    weights.insist({"dynamic": False})
    for key in _WEIGHT_NOTES:
        weights.get(key)


def _no_group(weights: Settings) -> int:
    """Tools write -1 or null where there are no groups, and sometimes the size of blocks."""
    weights.get("group_size")
    return 0


def _activations(settings: Settings) -> tuple[bool, bool]:
    """Whether activations are meant to be rounded to eight bits, and by a scale that the file has."""
    inputs = settings.section("input_activations")
    if inputs is None:
        return False, False
    inputs.insist({"num_bits": 8, "symmetric": True})
    inputs.choice("strategy", ("token", "tensor", "group"))
    return True, not inputs.flag("dynamic", False)
