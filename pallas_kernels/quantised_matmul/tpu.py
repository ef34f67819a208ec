"""Rows times a quantised matrix of a stack on TPU: few rows by one kernel, many by another.

Both fetch tiles of the matrix as they lie in the stack: a slice of it would be copied first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Target, interpreter
from pallas_kernels.eighths import are_widened
from pallas_kernels.int8_matmul.reference import split_halves
from pallas_kernels.quantised_matmul.tpu_few import multiply_few
from pallas_kernels.quantised_matmul.tpu_many import multiply_many
from pallas_kernels.quantised_matmul.tpu_tiles import LANES, Matrix, Sizes

MAX_FEW_ROWS = 64
"""Rows up to which the matrix units wait for weights and not the other way round."""
ROW_TYPES = ("float32", "bfloat16", "int8", "int16")
FEW_TILE_BYTES, FEW_TILE_OUTPUTS = 4 << 20, 512
MANY_TILE_OUTPUTS, MANY_TILE_ROWS = 512, 512
MANY_TILES_BYTES = 60 << 20
"""Of vector memory; v5p is taken to have 64 MiB for each core."""
MAX_BROAD_ROWS = 32
"""Rows up to which the sums of FEW_OUTPUTS leave registers for what is widened."""
FEW_OUTPUTS, FEW_GROUP_OUTPUTS, FEW_NARROW_OUTPUTS = 512, 256, 128
"""Whose sums are in registers at the same time: fewer of more rows, fewest where channels have scales."""
FEW_BODY_BYTES = 4096
FEW_BROAD_BODY_BYTES = 2048
"""Where all outputs of a tile make a body long, and it does not scale groups."""


def obstacle(
    rows: tuple[tuple[int, ...], str],
    values: tuple[tuple[int, ...], str],
    num_groups: int,
    has_zeros: bool,
    **_: object,
) -> str | None:
    """Why the kernels cannot multiply, or None."""
    num_inputs, row_type = rows[0][1], rows[1]
    if row_type not in ROW_TYPES:
        return f"rows of {row_type}"
    packed = values[1] == "uint8"
    step = 2 * LANES if packed else LANES
    if num_groups and num_inputs % step:
        return f"{num_inputs} inputs are no multiple of {step}"
    if (packed or has_zeros) and not num_groups:
        return "numbers of four bits, or zeros, with one scale a channel"
    if num_groups and LANES % (num_inputs // num_groups) and (num_inputs // num_groups) % LANES:
        return f"groups of {num_inputs // num_groups} inputs do not fit into {LANES} lanes"
    return None


def multiply_tpu(
    x_TI: jax.Array,
    values_LOI: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    layer: jax.Array | int,
    row_scale_T: jax.Array | None,
    *,
    out_type: Any,
    target: Target,
    interpret: bool,
    bias_LO: jax.Array | None = None,
    sizes: Sizes | None = None,
) -> jax.Array:
    """See `quantised_matmul`. Sizes are for tests and tuning."""
    num_rows, num_inputs = x_TI.shape
    own = [array if interpret else _left_in_place(array) for array in (scales, zeros, bias_LO)]
    matrix = Matrix(values_LOI, own[0], own[1], num_inputs, own[2])
    sizes = sizes or choose_sizes(num_rows, matrix, target)
    padding = -num_rows % sizes.rows
    x_TI = jnp.pad(x_TI, ((0, padding), (0, 0)))
    row_scale_T1 = None if row_scale_T is None else jnp.pad(row_scale_T, (0, padding))[:, None]
    x_PTI = (split_halves(x_TI) if x_TI.dtype == jnp.int16 else x_TI).reshape(-1, *x_TI.shape)
    multiply = multiply_many if sizes.many else multiply_few
    out_TO = multiply(
        jnp.asarray(layer, jnp.int32).reshape(1),
        x_PTI,
        row_scale_T1,
        matrix,
        out_type=out_type,
        sizes=sizes,
        interpret=interpreter(interpret),
    )
    return out_TO[:num_rows]


def _left_in_place(array: jax.Array | None) -> jax.Array | None:
    """What belongs to all matrices of a stack: XLA would fetch it whole into vector memory for each of them,
    for the kernel to take one's."""
    if array is None or array.shape[0] == 1 or not isinstance(array, Tracer):
        return array
    return pltpu.with_memory_space_constraint(array, pltpu.HBM)


def choose_sizes(num_rows: int, matrix: Matrix, target: Target) -> Sizes:
    """Tiles for so many rows."""
    row_bytes = matrix.values.shape[2]
    whole = -(-matrix.num_outputs // (2 * LANES)) * 2 * LANES
    eighths = are_widened(target)
    if num_rows <= MAX_FEW_ROWS:
        rows = 8 if num_rows <= 8 else -(-num_rows // 16) * 16
        fitting = FEW_TILE_BYTES // row_bytes // (2 * LANES) * 2 * LANES
        outputs = max(2 * LANES, min(FEW_TILE_OUTPUTS, fitting, whole))
        block, body = FEW_OUTPUTS, FEW_BODY_BYTES
        if rows > MAX_BROAD_ROWS:
            block = FEW_GROUP_OUTPUTS if matrix.num_groups else FEW_NARROW_OUTPUTS
        elif not matrix.num_groups:
            body = FEW_BROAD_BODY_BYTES
        return Sizes(rows, outputs, block, body, many=False, eighths=eighths)
    # Two tiles of the matrix and a widened one take at most half, two of rows the rest, two bytes a number.
    fitting = MANY_TILES_BYTES // 2 // (2 * row_bytes + 2 * matrix.num_inputs) // (2 * LANES) * 2 * LANES
    rows_fitting = MANY_TILES_BYTES // 2 // (4 * matrix.num_inputs) // 32 * 32
    rows = min(MANY_TILE_ROWS, max(32, rows_fitting), -(-num_rows // 32) * 32)
    outputs = max(2 * LANES, min(MANY_TILE_OUTPUTS, fitting, whole))
    return Sizes(rows, outputs, outputs, matrix.num_bytes, many=True, eighths=eighths)
