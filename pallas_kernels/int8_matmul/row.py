"""One row, for XLA on CPU, whose products of integers take two or more, and 30 to 60 us before they begin.

A sum along the rows of the matrix is compiled to the loop that one would write: the row of x in registers, a
multiply-add of 16 numbers an instruction, outputs dealt out to threads. But XLA cuts one sum of more than 32
numbers into windows first, and writes the products to memory for them; several sums at once it leaves whole.
They are those of as many parts of the matrix, which also has memory busy at several places at a time.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.int8_matmul.reference import quantise_rows

_MOST_SUMS = 8
"""At once. 30 layers of 3.5 MB, two cores of a Xeon: 2 take 8.2 ms, 4 6.5, 8 5.3, 16 22."""


def obstacle(*, num_rows: int, num_outputs: int, **_: object) -> str | None:
    """Why this cannot do a product, or is no way to do it, or None."""
    if num_rows != 1:
        return f"{num_rows} rows, not one"
    return "an odd number of outputs" if num_outputs % 2 else None


def multiply_row(
    x_1I: jax.Array, w_LOI: jax.Array, layer: jax.Array, scale_1: jax.Array, scale_LO: jax.Array
) -> jax.Array:
    """See `int8_matmul`."""
    only = w_LOI.shape[0] == 1
    w_OI, scale_O = (w_LOI[0], scale_LO[0]) if only else (w_LOI[layer], scale_LO[layer])
    # Else the rounding of x is computed anew for each output.
    x_1I = jax.lax.optimization_barrier(x_1I)
    products_OI = w_OI.astype(jnp.int32) * x_1I.astype(jnp.int32)
    num_sums = math.gcd(_MOST_SUMS, w_OI.shape[0])
    parts = tuple(jnp.split(products_OI, num_sums))
    sums_O = jnp.concatenate(jax.lax.reduce(parts, (np.int32(0),) * num_sums, _add, (1,)))
    return (sums_O.astype(jnp.float32) * (scale_1 * scale_O))[None]


def round_and_multiply_row(
    x_1I: jax.Array, w_LOI: jax.Array, layer: jax.Array, scale_LO: jax.Array, *, row_bits: int
) -> jax.Array:
    """See `rounded_int8_matmul`."""
    rows_1I, scale_1 = quantise_rows(x_1I, row_bits)
    return multiply_row(rows_1I, w_LOI, layer, scale_1, scale_LO)


def _add(sums: tuple[jax.Array, ...], more: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(one + other for one, other in zip(sums, more, strict=True))
