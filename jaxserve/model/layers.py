"""The small pieces of a layer. Axes: T rows, D hidden, F feed-forward width, H query heads, h head size."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import LayerKind
from jaxserve.model.stacked import stacked_product
from jaxserve.quantization.products import Reach, direct, quantised_product
from jaxserve.quantization.stacked import stack_of_one
from jaxserve.quantization.weight import QuantisedWeight, dequantise
from pallas_kernels.dispatch import Target
from pallas_kernels.int8_matmul import int8_matmul, join_halves, rounded_int8_matmul, split_halves

Weight = jax.Array | QuantisedWeight
"""A matrix `[*out, *in]`."""


def linear(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """`[T, *out]`: x `[T, *in]` times a weight `[*out, *in]`, in the type of x."""
    out = product(x, weight)
    if bias is not None:
        out = out + bias[None]
    return out.astype(x.dtype)


def product(x: jax.Array, weight: Weight) -> jax.Array:
    """The same in float32. The axes stay apart, since a weight may be sharded along any of them."""
    if isinstance(weight, QuantisedWeight):
        return quantised_product(x, weight, contract, contract_integers, direct(weight.values))
    return contract(x, weight)


def product_flat(
    x: jax.Array, weight: Weight, reach: Reach | None = None, *, target: Target | None = None
) -> jax.Array:
    """The same on one device, as a product of two matrices: all that XLA's kernels on CPU are fast at, and
    what a kernel on GPU takes.

    Args:
        x: the rows.
        weight: the matrix.
        reach: how to come by the matrix's numbers where they must be chosen while the program runs.
        target: the device, for which kernels are chosen.
    """
    if isinstance(weight, QuantisedWeight):
        if target is not None and target.platform == "gpu" and reach is None:
            stack = stack_of_one(weight)
            if stack is not None:
                return stacked_product(x, stack, 0, out_type=jnp.float32, target=target)
        if weight.format.row_bits and reach is None:
            return rounded_product(x, jax.tree.map(lambda array: array[None], weight), 0, target=target)
        integers = functools.partial(contract_integers_flat, target=target)
        return quantised_product(x, weight, contract_flat, integers, reach or direct(weight.values))
    return (reach or direct(weight))(lambda values, x: contract_flat(x, values), x)


def contract(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`[T, *out]`: two arrays multiplied, in float32; integers of 8 bits, exactly, in int32."""
    num_outputs = weight.ndim - x.ndim + 1
    contracted = tuple(range(1, x.ndim)), tuple(range(num_outputs, weight.ndim))
    return jax.lax.dot_general(
        x,
        weight,
        (contracted, ((), ())),
        # float32 means float32: TPUs multiply in bfloat16 unless told.
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
    )


def contract_integers(x: jax.Array, weight: jax.Array, scale_T: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 `[T, *out]`: a sum of int8, or int16, rows times int8, exact, times its row's and its output's
    scale."""
    is_wide = x.dtype == jnp.int16
    sums = join_halves(contract(split_halves(x), weight)) if is_wide else contract(x, weight)
    return sums.astype(jnp.float32) * (scale_T.reshape(-1, *(1,) * scales.ndim) * scales[None])


def contract_flat(x: jax.Array, weight: jax.Array) -> jax.Array:
    """As `contract`, with the axes of each factor joined to two."""
    rows, matrix, outputs = _flat(x, weight)
    return contract(rows, matrix).reshape(-1, *outputs)


def contract_integers_flat(
    x: jax.Array, weight: jax.Array, scale_T: jax.Array, scales: jax.Array, *, target: Target | None
) -> jax.Array:
    """As `contract_integers`, likewise."""
    rows, matrix, outputs = _flat(x, weight)
    scales_1O = scales.reshape(1, -1)
    return int8_matmul(rows, matrix[None], 0, scale_T, scales_1O, target=target).reshape(-1, *outputs)


def rounded_product(
    x: jax.Array, stack: QuantisedWeight, layer: jax.Array | int, *, target: Target | None
) -> jax.Array:
    """float32 `[T, *out]`: x `[T, *in]`, its rows rounded, times one of a stack `[L, *out, *in]`."""
    num_layers, outputs = stack.scales.shape[0], stack.scales.shape[1:]
    matrices_LOI = stack.values.reshape(num_layers, math.prod(outputs), -1)
    rows_TI, scale_LO = x.reshape(x.shape[0], -1), stack.scales.reshape(num_layers, -1)
    bits = stack.format.row_bits
    out_TO = rounded_int8_matmul(rows_TI, matrices_LOI, layer, scale_LO, row_bits=bits, target=target)
    return out_TO.reshape(-1, *outputs)


def _flat(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """Rows `[T, in]`, a matrix `[out, in]`, and the axes that its outputs were."""
    outputs = weight.shape[: weight.ndim - x.ndim + 1]
    return x.reshape(x.shape[0], -1), weight.reshape(math.prod(outputs), -1), outputs


def take_rows(table: Weight, row_T: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`[T, D]`: rows of a table `[V, D]`; ids beyond it take its last row."""
    taken = jax.tree.map(lambda array: jnp.take(array, row_T, axis=0, mode="clip"), table)
    return dequantise(taken).astype(dtype) if isinstance(taken, QuantisedWeight) else taken


def rope_kind(kind: LayerKind) -> LayerKind:
    """The part of a layer kind that its rotary tables depend on."""
    return LayerKind(rope_theta=kind.rope_theta, rope_scaling=kind.rope_scaling)


def rope_tables(kind: LayerKind, head_size: int, position_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[T, 1, h / 2]` in float32, the layer kind's frequency scaling applied."""
    frequency, factor = _frequencies(kind, head_size)
    angle_Th = position_T.astype(jnp.float32)[:, None] * jnp.asarray(frequency)[None]
    return jnp.cos(angle_Th)[:, None] * factor, jnp.sin(angle_Th)[:, None] * factor


def apply_rope(x_THh: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + h/2) of each head (Su et al. 2021, in the half-split order)."""
    first, second = jnp.split(x_THh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_THh.dtype)


def _frequencies(kind: LayerKind, head_size: int) -> tuple[np.ndarray, float]:
    """Angle per position of each pair as float32 `[h / 2]`, and a factor on the rotated vectors."""
    exponent = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    frequency = np.float32(1.0) / np.float32(kind.rope_theta) ** exponent
    scaling = kind.rope_scaling
    if scaling is None:
        return frequency, 1.0
    if scaling.kind == "linear":
        return frequency / np.float32(scaling.factor), 1.0
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (frequency * (keep + (1 - keep) / scaling.factor)).astype(np.float32), 1.0

    def pair_with_turns(turns: float) -> float:
        span = math.log(scaling.original_max_position / (turns * 2 * math.pi))
        return head_size * span / (2 * math.log(kind.rope_theta))

    low = max(math.floor(pair_with_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(scaling.beta_slow)), head_size - 1)
    ramp = np.clip((np.arange(head_size // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    blended = frequency * (1 - ramp) + frequency / scaling.factor * ramp
    return blended.astype(np.float32), scaling.attention_factor
