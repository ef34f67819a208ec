"""What the operation means, in jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int8_matmul.reference import multiply_reference as multiply_integers
from pallas_kernels.quantised_matmul.nibbles import unpack_nibbles

MIDDLE_OF_NIBBLE = 8
"""What a number of four bits stands for zero by, unless its group says otherwise."""


def multiply_reference(
    x_TI: jax.Array,
    values_LOI: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    layer: jax.Array | int,
    row_scale_T: jax.Array | None,
    *,
    out_type: Any,
    bias_LO: jax.Array | None = None,
    **_: object,
) -> jax.Array:
    """See `quantised_matmul`."""
    if bias_LO is not None:
        operands = x_TI, values_LOI, scales, zeros, layer, row_scale_T
        return with_bias(multiply_reference(*operands, out_type=jnp.float32), bias_LO, layer, out_type)

    def own(stack: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(stack, index_in(stack, layer), 0, keepdims=False)

    if x_TI.dtype == jnp.float8_e4m3fn and row_scale_T is not None:
        # Exact in bfloat16, which every device multiplies.
        unscaled_TO = _contract(x_TI.astype(jnp.bfloat16), own(values_LOI).astype(jnp.bfloat16))
        return (unscaled_TO * (row_scale_T[:, None] * own(scales)[None])).astype(out_type)
    if row_scale_T is not None:
        index = jnp.asarray(layer, jnp.int32)
        return multiply_integers(x_TI, values_LOI, index, row_scale_T, scales).astype(out_type)
    if scales.ndim == 2 and zeros is None and values_LOI.dtype != jnp.uint8:
        # Eight bits are exact in every type that x can have, so the scales can wait.
        unscaled_TO = _contract(x_TI, own(values_LOI).astype(x_TI.dtype))
        return (unscaled_TO * own(scales)[None]).astype(out_type)

    def own_by_output(stack: jax.Array) -> jax.Array:
        return own(stack).T if stack.ndim == 3 else own(stack)

    zeros = None if zeros is None else own_by_output(zeros)
    matrix_OI = widened(own(values_LOI), own_by_output(scales), zeros)
    return _contract(x_TI, matrix_OI.astype(x_TI.dtype)).astype(out_type)


def index_in(stack: Any, layer: Any) -> Any:
    """Where a layer's part of an array is: that of one layer is its own."""
    return 0 if stack.shape[0] == 1 else layer


def with_bias(out_TO: jax.Array, bias_LO: jax.Array, layer: jax.Array | int, out_type: Any) -> jax.Array:
    """A product in float32 with a layer's bias added, in the type that is wanted."""
    bias_1O = jax.lax.dynamic_index_in_dim(bias_LO, index_in(bias_LO, layer), 0)
    return (out_TO + bias_1O.astype(jnp.float32)).astype(out_type)


def widened(values: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    """Float32 of a matrix: `(value - zero) * scale`.

    Args:
        values: int8, fp8, or uint8 of two numbers each, `[*out, *in]`.
        scales: `[*out]`, or `[*out, groups]` for groups of the flattened inputs.
        zeros: in the form of `scales`, or None for those in the middle.
    """
    packed = values.dtype == jnp.uint8
    values = unpack_nibbles(values) if packed else values
    grouped = values.reshape(*scales.shape, -1)
    if zeros is not None:
        grouped = grouped.astype(jnp.int32) - zeros[..., None].astype(jnp.int32)
    elif packed:
        grouped = grouped - MIDDLE_OF_NIBBLE
    return (grouped.astype(jnp.float32) * scales[..., None].astype(jnp.float32)).reshape(values.shape)


def _contract(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x_TI,
        w_OI,
        (((1,), (1,)), ((), ())),
        # float32 means float32: TPUs multiply in bfloat16 unless told.
        precision=jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
