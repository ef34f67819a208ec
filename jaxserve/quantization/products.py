"""Rows times a quantised matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.quantization.weight import INT8_MAX, SMALLEST_SCALE, QuantisedWeight, dequantise

Contract = Callable[[jax.Array, jax.Array], jax.Array]
"""x `[T, *in]` and a matrix `[*out, *in]` of one type to `[T, *out]`, in float32 or of integers in int32."""

Reach = Callable[..., jax.Array]
"""`reach(f, *operands)` is `f(values, *operands)`, wherever a matrix's values lie."""


def direct(values: jax.Array) -> Reach:
    """For values that are at hand."""

    def reach(function: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        return function(values, *operands)

    return reach


def quantised_product(x: jax.Array, weight: QuantisedWeight, contract: Contract, reach: Reach) -> jax.Array:
    """Float32 `[T, *out]`: x `[T, *in]` times a quantised `[*out, *in]`.

    Args:
        x: the rows, floating point.
        weight: of one layer; its values are reached by `reach` alone.
        contract: the product of two arrays.
        reach: `direct(weight.values)`, or what chooses them while the program runs.
    """
    if weight.format.int8_rows:
        rows, scale_T = quantise_rows(x)
        sums = reach(lambda values, rows: contract(rows, values), rows)
        scale_T = scale_T.reshape(-1, *(1,) * (sums.ndim - 1))
        return sums.astype(jnp.float32) * (scale_T * weight.scales[None])
    if weight.format.group or weight.format.zeros or weight.format.bits == 4:

        def multiply(
            values: jax.Array, x: jax.Array, scales: jax.Array, zeros: jax.Array | None
        ) -> jax.Array:
            matrix = dequantise(QuantisedWeight(values, scales, zeros, weight.format))
            return contract(x, matrix.astype(x.dtype))

        return reach(multiply, x, weight.scales, weight.zeros)
    # Eight bits are exact in every type that x can have, so the scales can wait.
    unscaled = reach(lambda values, x: contract(x, values.astype(x.dtype)), x)
    return unscaled * weight.scales[None]


def quantise_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x `[T, *in]` rounded to int8, and each row's scale, float32 `[T]`."""
    wide = x.astype(jnp.float32)
    axes = tuple(range(1, x.ndim))
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / INT8_MAX, SMALLEST_SCALE)
    return jnp.round(wide / scale).astype(jnp.int8), scale.reshape(-1)
