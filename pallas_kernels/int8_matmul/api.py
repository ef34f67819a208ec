"""The operation's one entry: checks shapes at trace time, then picks an implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Target, choose
from pallas_kernels.int8_matmul.cpu import multiply_cpu, round_and_multiply_cpu
from pallas_kernels.int8_matmul.reference import multiply_reference, round_and_multiply_reference
from pallas_kernels.int8_matmul.row import multiply_row, round_and_multiply_row
from pallas_kernels.int8_matmul.row import obstacle as row_obstacle
from pallas_kernels.native import obstacle

IMPLEMENTATIONS = (
    Implementation("cpu", "cpu", multiply_cpu, obstacle),
    Implementation("row", "cpu", multiply_row, row_obstacle),
    Implementation("reference", None, multiply_reference),
)
ROUNDING_IMPLEMENTATIONS = (
    Implementation("cpu", "cpu", round_and_multiply_cpu, obstacle),
    Implementation("row", "cpu", round_and_multiply_row, row_obstacle),
    Implementation("reference", None, round_and_multiply_reference),
)


def int8_matmul(
    x_TI: jax.Array,
    w_LOI: jax.Array,
    layer: jax.Array | int,
    scale_T: jax.Array,
    scale_LO: jax.Array,
    *,
    target: Target | None = None,
) -> jax.Array:
    """float32 `[T, O]`: rows of integers times an int8 matrix, summed exactly in int32, then scaled.

    Args:
        x_TI: the rows, int8, or int16 of at most 14 bits whose sums of products fit into 32 bits.
        w_LOI: matrices, a row for each output, of which one is read.
        layer: int32, which one.
        scale_T, scale_LO: float32, of each row and of each output; a sum is multiplied by their product.
        target: the device to trace for; None for any, which takes the reference.

    Raises ValueError at trace time on shapes that disagree.
    """
    _check(x_TI, w_LOI, scale_LO)
    if scale_T.shape != x_TI.shape[:1]:
        raise ValueError(f"scales {scale_T.shape} of rows {x_TI.shape}: there must be one of each")
    target = target or Target()
    chosen, _ = choose("int8_matmul", IMPLEMENTATIONS, target, **_facts(x_TI, w_LOI, target))
    return chosen.run(x_TI, w_LOI, jnp.asarray(layer, jnp.int32), scale_T, scale_LO)


def rounded_int8_matmul(
    x_TI: jax.Array,
    w_LOI: jax.Array,
    layer: jax.Array | int,
    scale_LO: jax.Array,
    *,
    row_bits: int,
    target: Target | None = None,
) -> jax.Array:
    """float32 `[T, O]`: the same of rows in floating point, which `quantise_rows` rounds to 8 or 12 bits.

    Raises ValueError at trace time on shapes that disagree.
    """
    _check(x_TI, w_LOI, scale_LO)
    target = target or Target()
    chosen, _ = choose("int8_matmul", ROUNDING_IMPLEMENTATIONS, target, **_facts(x_TI, w_LOI, target))
    return chosen.run(x_TI, w_LOI, jnp.asarray(layer, jnp.int32), scale_LO, row_bits=row_bits)


def _facts(x_TI: jax.Array, w_LOI: jax.Array, target: Target) -> dict[str, Any]:
    return {"native": target.native, "num_rows": x_TI.shape[0], "num_outputs": w_LOI.shape[1]}


def _check(x_TI: jax.Array, w_LOI: jax.Array, scale_LO: jax.Array) -> None:
    if x_TI.ndim != 2 or w_LOI.ndim != 3 or x_TI.shape[1] != w_LOI.shape[2]:
        raise ValueError(f"rows {x_TI.shape} times matrices {w_LOI.shape}: the last axes must agree")
    if scale_LO.shape != w_LOI.shape[:2]:
        raise ValueError(
            f"scales {scale_LO.shape} of matrices {w_LOI.shape}: there must be one of each output"
        )
