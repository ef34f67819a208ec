"""Rows times a quantised matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxserve.quantization.weight import QuantisedWeight, dequantise
from pallas_kernels.int8_matmul import quantise_rows

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
