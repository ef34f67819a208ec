"""Rows times a quantised matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.quantization.weight import SMALLEST_SCALE, QuantisedWeight, dequantise

Contract = Callable[[jax.Array, jax.Array], jax.Array]
"""x `[T, *in]` and a matrix `[*out, *in]` of one type to `[T, *out]`, in float32."""

ContractIntegers = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""The same of integers and float32 scales `[T]` and `[*out]`: a sum, exact, times the product of the two."""

Reach = Callable[..., jax.Array]
"""`reach(f, *operands)` is `f(values, *operands)`, wherever a matrix's values lie."""


def direct(values: jax.Array) -> Reach:
    """For values that are at hand."""

    def reach(function: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        return function(values, *operands)

    return reach


def quantised_product(
    x: jax.Array,
    weight: QuantisedWeight,
    contract: Contract,
    contract_integers: ContractIntegers,
    reach: Reach,
) -> jax.Array:
    """Float32 `[T, *out]`: x `[T, *in]` times a quantised `[*out, *in]`.

    Args:
        x: the rows, floating point.
        weight: of one layer; its values are reached by `reach` alone.
        contract, contract_integers: the product of two arrays.
        reach: `direct(weight.values)`, or what chooses them while the program runs.
    """
    if weight.format.row_bits:
        rows, scale_T = quantise_rows(x, weight.format.row_bits)
        return reach(
            lambda values, rows, *scales: contract_integers(rows, values, *scales),
            rows,
            scale_T,
            weight.scales,
        )
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


def quantise_rows(x: jax.Array, bits: int = 8) -> tuple[jax.Array, jax.Array]:
    """x `[T, *in]` rounded to integers, and each row's scale, float32 `[T]`.

    They are int8, or int16 for more than 8 bits, of no more than leave room for the sum of a row's products
    with int8 in 32 bits: of rows of 8,259 numbers and more not quite 12.
    """
    wide = x.astype(jnp.float32)
    axes = tuple(range(1, x.ndim))
    largest = min(2 ** (bits - 1) - 1, (2**31 - 1) // (128 * math.prod(x.shape[1:])))
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / largest, SMALLEST_SCALE)
    return jnp.round(wide / scale).astype(jnp.int8 if bits == 8 else jnp.int16), scale.reshape(-1)
