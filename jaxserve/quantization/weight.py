"""A quantised matrix as a pytree, made from an array and turned back into one."""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxserve.quantization.formats import FORMATS, WeightFormat
from pallas_kernels.int8_matmul import SMALLEST_SCALE

INT8_MAX = 127.0
FP8_MAX = 448.0
UINT4_MAX = 15
INT4_MAX = 7


@flax.struct.dataclass
class QuantisedWeight:
    """A matrix `[*out, *in]`, each number `(value - zero) * scale`, or with minima `value * scale + zero`.

    In the parameter tree of a model the leaves may have leading axes (layers, experts), and `values` may be
    a tuple of arrays, one for each layer, beside stacked scales.
    """

    values: Any
    """`[*out, *in]` in the format's storage; the last axis is half as long where a byte holds two."""
    scales: Any
    """`[*out]` for channels, `[*out, groups]` for groups of the flattened inputs, in the format's type."""
    zeros: Any
    """In the form of `scales`, in the format's `zero_type`, or None for a symmetric format."""
    format: WeightFormat = flax.struct.field(pytree_node=False)


@functools.partial(jax.jit, static_argnames=("format", "num_input_axes"))
def quantise(array: Any, format: WeightFormat, num_input_axes: int = 1) -> QuantisedWeight:
    """Round a matrix `[*out, *in]` to a format, to the nearest number that it has.

    Args:
        array: floating point.
        format: what to round to.
        num_input_axes: how many of the last axes are contracted.

    Raises ValueError for a format that is not one of `FORMATS`, which are rounded to, and if two numbers are
    to share a byte and the last axis is odd.
    """
    if format.name not in FORMATS:
        raise ValueError(f"{format.name} is only read; arrays are rounded to {', '.join(FORMATS)}")
    outputs = array.shape[: array.ndim - num_input_axes]
    flat = jnp.asarray(array, jnp.float32).reshape(*outputs, -1)
    if format.storage == "uint4x2":
        _check_pairs(array.shape, format)
        return _quantise_int4(flat, format, array.shape)
    groups = flat.reshape(*outputs, -1, format.group_size(flat.shape[-1])) if format.group else flat
    largest = INT8_MAX if format.storage == "int8" else FP8_MAX
    scales = _stored_scales(jnp.max(jnp.abs(groups), axis=-1) / largest, format)
    scaled = jnp.clip(groups / scales[..., None].astype(jnp.float32), -largest, largest)
    values = (jnp.round(scaled) if format.storage == "int8" else scaled).astype(jnp.dtype(format.storage))
    return QuantisedWeight(values.reshape(array.shape), scales, None, format)


def blank(shape: tuple[int, ...], format: WeightFormat, num_input_axes: int = 1) -> QuantisedWeight:
    """A matrix `[*out, *in]` of zeros: what has the shapes and types of any in this format.

    Raises ValueError if two numbers are to share a byte and the last axis is odd.
    """
    outputs, inputs = shape[: len(shape) - num_input_axes], shape[len(shape) - num_input_axes :]
    num_inputs = math.prod(inputs)
    groups = (num_inputs // format.group_size(num_inputs),) if format.group else ()
    if format.storage == "uint4x2":
        _check_pairs(shape, format)
        values = jnp.zeros((*shape[:-1], shape[-1] // 2), jnp.uint8)
    else:
        values = jnp.zeros(shape, jnp.dtype(format.storage))
    scales = jnp.zeros((*outputs, *groups), jnp.dtype(format.scale_type))
    zeros = jnp.zeros(scales.shape, jnp.dtype(format.zero_type)) if format.zeros else None
    return QuantisedWeight(values, scales, zeros, format)


def dequantise(weight: QuantisedWeight) -> jax.Array:
    """Float32 `[*out, *in]`."""
    packed = weight.format.storage == "uint4x2"
    values = unpack_nibbles(weight.values) if packed else weight.values
    grouped = values.reshape(*weight.scales.shape, -1)
    scales = weight.scales[..., None].astype(jnp.float32)
    if weight.format.minima:
        # A product of so few bits is exact: fused with the sum or not, it is rounded once.
        minima = weight.zeros[..., None].astype(jnp.float32)
        return (grouped.astype(jnp.float32) * scales + minima).reshape(values.shape)
    if weight.zeros is not None:
        grouped = grouped.astype(jnp.int32) - weight.zeros[..., None].astype(jnp.int32)
    elif packed:
        grouped = grouped - (INT4_MAX + 1)
    return (grouped.astype(jnp.float32) * scales).reshape(values.shape)


def regrouped(weight: QuantisedWeight, num_parts: int) -> QuantisedWeight:
    """The same numbers, in groups so small that each of `num_parts` equal runs of inputs holds whole ones.

    Raises ValueError where a run would end within a byte.
    """
    num_groups = weight.scales.shape[-1]
    packed = weight.format.storage == "uint4x2"
    num_inputs = weight.values.size * (2 if packed else 1) * num_groups // weight.scales.size
    group = num_inputs // num_groups
    smaller = math.gcd(group, num_inputs // num_parts)
    if packed and smaller % 2:
        raise ValueError(
            f"{weight.format.name} of {num_inputs} inputs in {num_parts} parts: two numbers of a byte part"
        )
    if smaller == group:
        return weight

    def repeat(array: jax.Array) -> jax.Array:
        return jnp.repeat(array, group // smaller, axis=-1)

    zeros = None if weight.zeros is None else repeat(weight.zeros)
    return QuantisedWeight(weight.values, repeat(weight.scales), zeros, weight.format)


def pack_nibbles(values: jax.Array) -> jax.Array:
    """uint8 of half the last axis: each byte two neighbours of 0 to 15, the first in its low half."""
    pairs = values.astype(jnp.uint8).reshape(*values.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """The int32 numbers that `pack_nibbles` packed."""
    pairs = jnp.stack([packed & 0x0F, packed >> 4], axis=-1).astype(jnp.int32)
    return pairs.reshape(*packed.shape[:-1], -1)


def _check_pairs(shape: tuple[int, ...], format: WeightFormat) -> None:
    if shape[-1] % 2:
        raise ValueError(f"{format.name} of an array {shape}, whose last axis is odd")


def _quantise_int4(flat: jax.Array, format: WeightFormat, shape: tuple[int, ...]) -> QuantisedWeight:
    """Of `[*out, in]`; the scale is rounded first, so that values are the nearest ones under it."""
    groups = flat.reshape(*flat.shape[:-1], -1, format.group_size(flat.shape[-1]))
    if format.zeros:
        low, high = jnp.minimum(jnp.min(groups, -1), 0.0), jnp.maximum(jnp.max(groups, -1), 0.0)
        scales = _stored_scales((high - low) / UINT4_MAX, format)
        zeros = jnp.clip(jnp.round(-low / scales.astype(jnp.float32)), 0, UINT4_MAX)
    else:
        scales = _stored_scales(jnp.max(jnp.abs(groups), -1) / INT4_MAX, format)
        zeros = jnp.full(scales.shape, INT4_MAX + 1, jnp.float32)
    values = jnp.round(groups / scales[..., None].astype(jnp.float32)) + zeros[..., None]
    packed = pack_nibbles(jnp.clip(values, 0, UINT4_MAX).reshape(shape))
    return QuantisedWeight(packed, scales, zeros.astype(jnp.uint8) if format.zeros else None, format)


def _stored_scales(scales: jax.Array, format: WeightFormat) -> jax.Array:
    return jnp.maximum(scales, SMALLEST_SCALE).astype(jnp.dtype(format.scale_type))
