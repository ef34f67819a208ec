"""What the operation means, in jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_NUM_SUMS = 4
"""Columns, and fewest rows, of the product that adds up squares."""


def norm_reference(x: jax.Array, weight_D: jax.Array, eps: float, *, exact_order: bool) -> jax.Array:
    """See `rms_norm`. XLA on CPU adds a row's squares up in an order that depends on the number of rows; its
    matrix products do not, from two rows and columns up."""
    wide = x.astype(jnp.float32)
    squares = jnp.square(wide)
    if exact_order:
        rows = squares.reshape(-1, x.shape[-1])
        padding = max(0, _NUM_SUMS - rows.shape[0])
        sums = jax.lax.dot_general(
            jnp.pad(rows, ((0, padding), (0, 0))),
            jnp.ones((_NUM_SUMS, x.shape[-1]), jnp.float32),
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
        )[: rows.shape[0], :1]
        mean = sums.reshape(*x.shape[:-1], 1) / x.shape[-1]
    else:
        mean = jnp.mean(squares, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + eps) * weight_D).astype(x.dtype)


def add_and_norm_reference(
    x: jax.Array, y: jax.Array, weight_D: jax.Array, eps: float, *, exact_order: bool
) -> tuple[jax.Array, jax.Array]:
    """See `add_and_rms_norm`."""
    total = x + y
    return total, norm_reference(total, weight_D, eps, exact_order=exact_order)
