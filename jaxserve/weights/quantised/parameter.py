"""Parameters out of quantised modules: as they are where one format holds all of it, or widened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

from jaxserve.model.parameters import ParameterInfo
from jaxserve.quantization import WeightFormat
from jaxserve.weights.layout import Part
from jaxserve.weights.quantised.blocks import BLOCKS, Numbers, read_blocks
from jaxserve.weights.quantised.modules import StoredModule
from jaxserve.weights.quantised.packing import pack_nibbles
from jaxserve.weights.tensors import QUANTISED_ENCODINGS, StoredTensor

Source = tuple[Part, StoredTensor | StoredModule]
"""A part of a parameter and where it lies."""

_STORAGE = {"int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "uint4x2": np.uint8}
_SCALES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

_UNLIKE = "its parts are quantised differently"


@dataclass(frozen=True)
class StoredMatrix:
    """A parameter `[*out, *in]` in the numbers that its checkpoint stores; see `QuantisedWeight`."""

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    format: WeightFormat


def exact_format(info: ParameterInfo, sources: Sequence[Source]) -> WeightFormat | str | None:
    """What holds a parameter exactly; where nothing does, why not; None for one that is not quantised."""
    quantised = [source for _, source in sources if is_quantised(source)]
    if not quantised or info.full_precision:
        return None
    if len(quantised) < len(sources):
        return "only some of its parts are quantised"
    modules = [source for source in quantised if isinstance(source, StoredModule)]
    if not modules:
        blocks = {source.encoding.name for source in quantised if isinstance(source, StoredTensor)}
        return BLOCKS[blocks.pop()].format if len(blocks) == 1 else _UNLIKE
    scheme = modules[0].scheme
    if any(module.scheme != scheme for module in modules):
        return _UNLIKE
    format = scheme.format(modules[0].shape[1], {module.scale_encoding for module in modules})
    return format or "the groups of its inputs are permuted (act-order)"


def is_quantised(source: StoredTensor | StoredModule) -> bool:
    """Whether a part is anything but plain numbers."""
    return isinstance(source, StoredModule) or source.encoding.name in QUANTISED_ENCODINGS


def read_exactly(info: ParameterInfo, format: WeightFormat, sources: Sequence[Source]) -> StoredMatrix:
    """A parameter that this format holds, read one module at a time; undefined without sources."""
    first_input = len(info.shape) - info.num_input_axes
    outputs, inputs = info.shape[:first_input], info.shape[first_input:]
    packed = format.storage == "uint4x2"
    last = inputs[-1] // 2 if packed else inputs[-1]
    values = np.empty((*info.shape[:-1], last), _STORAGE[format.storage])
    num_groups = prod(inputs) // format.group_size(prod(inputs))
    scales = np.empty((*outputs, num_groups), _SCALES[format.scale_type])
    zeros = np.empty(scales.shape, format.zero_type) if format.zeros else None
    for part, source in sources:
        stored = _numbers(source)
        _fill(part.place(values), pack_nibbles(stored[0]) if packed else stored[0])
        _fill(part.place(scales), stored[1])
        if zeros is not None:
            assert stored[2] is not None
            _fill(part.place(zeros), stored[2])
    if not format.group:
        scales, zeros = scales[..., 0], None if zeros is None else zeros[..., 0]
    return StoredMatrix(values, scales, zeros, format)


def _numbers(source: StoredTensor | StoredModule) -> Numbers:
    if isinstance(source, StoredTensor):
        return read_blocks(source)
    matrix = source.read()
    return matrix.values, matrix.scales, matrix.zeros


def read_widened(parameter: np.ndarray, sources: Sequence[Source], wanted: np.ndarray | None = None) -> None:
    """Fill an array of a parameter's shape with its numbers, whatever they are stored as.

    `wanted`, of the same shape, says which must be there then, by default all; plain tensors are read no
    further.
    """
    for part, source in sources:
        view = part.place(parameter)
        if isinstance(source, StoredModule):
            _fill(view, source.read().widened())
        else:
            source.read_into(view, None if wanted is None else part.place(wanted))


def _fill(view: np.ndarray, array: np.ndarray) -> None:
    view[...] = array.reshape(view.shape)
