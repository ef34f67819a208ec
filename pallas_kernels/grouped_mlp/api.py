"""The operation's one entry: checks shapes at trace time.

There is one implementation on every platform, a loop of XLA's own fusions: `jax.lax.ragged_dot` makes XLA
copy the layer's experts out of the stack first (`benchmarks/results/tpu-experts.json`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.grouped_mlp.reference import grouped_mlp_reference


def grouped_mlp(
    x_TD: jax.Array,
    row_M: jax.Array,
    weight_M: jax.Array,
    gate_up_X2FD: Any,
    down_XDF: Any,
    group_sizes_E: jax.Array,
    first_group: jax.Array | int,
    *,
    multiply: Callable[[jax.Array, Any], jax.Array],
    activate: Callable[[jax.Array], jax.Array],
    tile_rows: int,
) -> jax.Array:
    """Each row's weighted sum over its choices, a choice being one pass through a group's feed-forward part.

    Nothing of a choice's size times D is stored: rows are gathered, and their results added up, inside.

    Args:
        x_TD: the rows.
        row_M: int32 row of each choice, the choices sorted by group; in one group no row twice.
        weight_M: float32 factor of each choice.
        gate_up_X2FD: every layer's gate and up matrices in one stack, `[out, in]` each. The whole stack and
            an offset, never a slice of it: a sliced operand of a kernel is copied. An array, or a tree whose
            arrays all have the groups as their first axis, such as a quantised stack.
        down_XDF: every layer's down matrices, likewise.
        group_sizes_E: int32 choices of each of this layer's groups; choices past the last group are dropped.
        first_group: the index of this layer's first group in the stacks.
        multiply: rows `[m, in]` and what one group has of a stack, to their products `[m, *out]` in float32.
        activate: the gated activation, `[m, 2, F]` to `[m, F]`.
        tile_rows: choices multiplied at a time; the order of summation depends on nothing else.

    Returns float32 `[T, D]`; a row adds up its choices in the order of their groups, whatever the other rows
    chose. Raises ValueError at trace time on shapes that disagree.
    """
    shapes = [array.shape for array in jax.tree.leaves((gate_up_X2FD, down_XDF))]
    num_groups = shapes[0][0]
    if any(shape[0] != num_groups for shape in shapes):
        raise ValueError(f"stacks of different numbers of groups: {', '.join(map(str, shapes))}")
    if isinstance(gate_up_X2FD, jax.Array) and isinstance(down_XDF, jax.Array):
        _, _, width, hidden = gate_up_X2FD.shape
        if x_TD.shape[1] != hidden or down_XDF.shape != (num_groups, hidden, width):
            raise ValueError(f"rows {x_TD.shape} through {gate_up_X2FD.shape} and {down_XDF.shape}")
    if row_M.shape != weight_M.shape:
        raise ValueError(f"{row_M.shape} choices with {weight_M.shape} weights")
    if group_sizes_E.shape[0] > num_groups:
        raise ValueError(f"{group_sizes_E.shape[0]} groups in a stack of {num_groups}")
    return grouped_mlp_reference(
        x_TD,
        row_M,
        weight_M,
        gate_up_X2FD,
        down_XDF,
        group_sizes_E,
        first_group,
        multiply=multiply,
        activate=activate,
        tile_rows=tile_rows,
    )
