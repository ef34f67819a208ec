"""What the operation means, in jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
    w_OI, scale_O = (w_LOI[0], scale_LO[0]) if only else (w_LOI[layer], scale_LO[layer])
    return _sums(x_TI, w_OI).astype(jnp.float32) * (scale_T[:, None] * scale_O[None])


def _sums(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """int32 `[T, O]`, exact."""
    if x_TI.dtype == jnp.int16:
        return join_halves(_sums(split_halves(x_TI), w_OI))
    # One row falls off XLA's fast path on CPU: 25 times slower than two. Elsewhere two are as cheap as one.
    rows_TI = jnp.pad(x_TI, ((0, 1), (0, 0))) if x_TI.shape[0] == 1 else x_TI
    contracted = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(rows_TI, w_OI, contracted, preferred_element_type=jnp.int32)[: x_TI.shape[0]]
