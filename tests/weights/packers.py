"""Quantised modules written by the public descriptions of their layouts, and the numbers they stand for.

Every packer takes a shape `[out, in]` and a random generator and gives the tensors of a module by the last
words of their names, and its weight in float32. Values are drawn, not rounded, so that all of them occur.
Words are put together number by number, with Python's integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Module = tuple[dict[str, np.ndarray], np.ndarray]
Packer = Callable[[tuple[int, int], np.random.Generator], Module]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each four bits of a word belong to, low bits first."""


def words(rows: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 `[rows, ceil]`: the numbers of each row in words, low bits first."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    packed = []
    for row in rows.tolist():
        padded = row + [0] * (-len(row) % per_word)
        packed.append(
            [
                sum(padded[first + place] << (bits * i) for i, place in enumerate(order))
                for first in range(0, len(padded), per_word)
            ]
        )
    return np.array(packed, np.uint32).view(np.int32)


def drawn_scales(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float16, bits: int = 4
) -> np.ndarray:
    """Such that weights are of a size that models have."""
    return ((0.03 + 0.15 * rng.random(shape)) / 2**bits).astype(dtype)


def numbers(values: np.ndarray, zeros: Any, scales: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """`[out, in]` of values `[out, in]`, and zeros and scales `[out, groups]`."""
    zeros = np.broadcast_to(zeros, scales.shape)
    steps = values.astype(np.float32) - zeros.astype(np.float32)[:, group_of]
    return steps * scales.astype(np.float32)[:, group_of]


def awq(group: int = 32, scale_type: Any = np.float16) -> Packer:
    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Module:
        outputs, inputs = shape
        size = inputs if group == -1 else group
        values = rng.integers(0, 16, shape)
        zeros = rng.integers(0, 16, (outputs, inputs // size))
        scales = drawn_scales(rng, zeros.shape, scale_type)
        tensors = {
            "qweight": words(values.T, 4, AWQ_ORDER),
            "qzeros": words(zeros.T, 4, AWQ_ORDER),
            "scales": np.ascontiguousarray(scales.T),
        }
        return tensors, numbers(values, zeros, scales, np.arange(inputs) // size)

    return pack


def gptq(
    bits: int = 4, group: int = 32, *, sym: bool = True, version: int = 1, act_order: bool = False
) -> Packer:
    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Module:
        outputs, inputs = shape
        size = inputs if group == -1 else group
        values = rng.integers(0, 2**bits, shape)
        zeros = np.full((outputs, inputs // size), 2 ** (bits - 1))
        if not sym:  # The first version cannot write a zero of 0.
            zeros = rng.integers(1, 2**bits, zeros.shape)
        scales = drawn_scales(rng, zeros.shape, bits=bits)
        group_of = np.arange(inputs, dtype=np.int32) // size
        if act_order:
            rng.shuffle(group_of)
        tensors = {
            "qweight": np.ascontiguousarray(words(values, bits).T),
            "qzeros": words((zeros - (1 if version == 1 else 0)).T, bits),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": group_of,
        }
        return tensors, numbers(values, zeros, scales, group_of)

    return pack


def packed(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    scale_type: Any = ml_dtypes.bfloat16,
) -> Packer:
    """pack-quantized; group 0 is a channel."""

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Module:
        outputs, inputs = shape
        size, half = group or inputs, 2 ** (bits - 1)
        values = rng.integers(-half, half, shape)
        zeros = np.zeros((outputs, inputs // size), np.int64)
        if not symmetric:
            zeros = rng.integers(-half, half, zeros.shape)
        scales = drawn_scales(rng, zeros.shape, scale_type, bits)
        group_of = np.arange(inputs, dtype=np.int32) // size
        if act_order:
            rng.shuffle(group_of)
        tensors = {
            "weight_packed": words(values + half, bits),
            "weight_scale": scales,
            "weight_shape": np.array(shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words((zeros + half).T, bits).T)
        if act_order:
            tensors["weight_g_idx"] = group_of
        return tensors, numbers(values, zeros, scales, group_of)

    return pack


def plain_type(
    kind: str,
    scale: str = "channel",
    *,
    zeros: bool = False,
    input_scale: bool = False,
    block: tuple[int, int] = (128, 128),
    scale_name: str = "weight_scale",
    scale_type: Any = np.float32,
) -> Packer:
    """int8 or fp8 `[out, in]`; a scale for each channel, block, group of `block[1]`, or the whole matrix."""

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Module:
        outputs, inputs = shape
        if kind == "int":
            values = rng.integers(-127, 128, shape).astype(np.int8)
        else:
            values = (rng.standard_normal(shape) * 30).astype(ml_dtypes.float8_e4m3fn)
        shapes = {
            "tensor": (1,),
            "scalar": (),
            "channel": (outputs, 1),
            "group": (outputs, inputs // block[1]),
            "block": (-(-outputs // block[0]), -(-inputs // block[1])),
        }
        scales = np.asarray(drawn_scales(rng, shapes[scale], scale_type, 8))
        rows, columns = np.arange(outputs)[:, None], np.arange(inputs)[None]
        if scale == "block":
            each = scales[rows // block[0], columns // block[1]]
        elif scale == "group":
            each = scales[rows, columns // block[1]]
        else:
            each = np.broadcast_to(scales, shape)
        tensors = {"weight": values, scale_name: scales}
        shift = np.zeros((outputs, 1), np.int8)
        if zeros:
            shift = tensors["weight_zero_point"] = rng.integers(-128, 128, (outputs, 1)).astype(np.int8)
        if input_scale:
            tensors["input_scale"] = np.array([0.5], np.float32)
        return tensors, (values.astype(np.float32) - shift.astype(np.float32)) * each.astype(np.float32)

    return pack


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith("_proj.weight") and len(shape) == 2


def quantise_modules(
    tensors: Mapping[str, np.ndarray],
    packer: Packer,
    chosen: Callable[[str, tuple[int, ...]], bool] = is_linear,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A model's tensors with the chosen modules quantised, and the plain tensors that they stand for."""
    rng = np.random.default_rng(7)
    stored: dict[str, np.ndarray] = {}
    exact = dict(tensors)
    for name, tensor in tensors.items():
        if not chosen(name, tensor.shape):
            stored[name] = tensor
            continue
        module = name.removesuffix(".weight")
        outputs, inputs = tensor.shape
        parts, exact[name] = packer((outputs, inputs), rng)
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    return stored, exact
