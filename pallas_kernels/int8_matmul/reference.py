"""What the operation means, in jnp."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST_SCALE = 1e-30
"""Of zeros, which any scale stores exactly. It is a normal number in bfloat16 too."""


def largest_integer(bits: int, num_inputs: int) -> int:
    """Of rows that are rounded to so many bits: as the sum of their products with int8 must fit into 32, of
    rows of 8,259 numbers and more not quite of 12."""
    return min(2 ** (bits - 1) - 1, (2**31 - 1) // (128 * num_inputs))


def quantise_rows(x: jax.Array, bits: int = 8) -> tuple[jax.Array, jax.Array]:
    """x `[T, *in]` rounded to integers, and each row's scale, float32 `[T]`.

    They are int8, or int16 for more than 8 bits, up to `largest_integer`. Written with the two products that
    XLA would make of the quotients, so that a kernel can give the same numbers.
    """
    wide = x.astype(jnp.float32)
    axes = tuple(range(1, x.ndim))
    step = np.float32(1.0) / np.float32(largest_integer(bits, math.prod(x.shape[1:])))
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=axes, keepdims=True) * step, SMALLEST_SCALE)
    return jnp.round(wide * (1.0 / scale)).astype(jnp.int8 if bits == 8 else jnp.int16), scale.reshape(-1)


def split_halves(x: jax.Array) -> jax.Array:
    """int8 `[2 * T, ...]` of int16 `[T, ...]` up to 14 bits: the upper halves, then the lower seven bits."""
    low = ((x + 64) & 127) - 64
    return jnp.concatenate([(x - low) >> 7, low]).astype(jnp.int8)


def join_halves(sums: jax.Array) -> jax.Array:
    """int32 `[T, ...]`: products of rows, from those `[2 * T, ...]` of their halves."""
    high, low = jnp.split(sums, 2)
    return (high << 7) + low


def multiply_reference(
    x_TI: jax.Array, w_LOI: jax.Array, layer: jax.Array, scale_T: jax.Array, scale_LO: jax.Array
) -> jax.Array:
    """See `int8_matmul`."""
    only = w_LOI.shape[0] == 1  # A slice is copied on CPU.
    w_OI = w_LOI[0] if only else w_LOI[layer]
    scale_O = scale_LO[0 if scale_LO.shape[0] == 1 else layer]
    return _sums(x_TI, w_OI).astype(jnp.float32) * (scale_T[:, None] * scale_O[None])


def round_and_multiply_reference(
    x_TI: jax.Array, w_LOI: jax.Array, layer: jax.Array, scale_LO: jax.Array, *, row_bits: int
) -> jax.Array:
    """See `rounded_int8_matmul`."""
    rows_TI, scale_T = quantise_rows(x_TI, row_bits)
    return multiply_reference(rows_TI, w_LOI, layer, scale_T, scale_LO)


def _sums(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """int32 `[T, O]`, exact."""
    if x_TI.dtype == jnp.int16:
        return join_halves(_sums(split_halves(x_TI), w_OI))
    # One row falls off XLA's fast path on CPU: 25 times slower than two. Elsewhere two are as cheap as one.
    rows_TI = jnp.pad(x_TI, ((0, 1), (0, 0))) if x_TI.shape[0] == 1 else x_TI
    contracted = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows_TI, w_OI, contracted, preferred_element_type=jnp.int32)[: x_TI.shape[0]]
