"""The operation's one entry: checks shapes at trace time, then picks an implementation."""

from __future__ import annotations

import jax

from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference


def grouped_matmul(
    x_MD: jax.Array,
    weights_XND: jax.Array,
    group_sizes_E: jax.Array,
    first_group: jax.Array | int,
    *,
    tile_rows: int,
) -> jax.Array:
    """Multiply each group of rows by its own matrix.

    Args:
        x_MD: rows sorted by group; rows past the last group are padding.
        weights_XND: every layer's matrices in one stack, `[out, in]` each. The whole stack and an offset,
            never a slice of it: a sliced operand of a kernel is copied.
        group_sizes_E: int32 rows of each of this layer's groups.
        first_group: the index of this layer's first matrix in the stack.
        tile_rows: rows multiplied at a time; the order of summation depends on nothing else.

    Returns `[M, N]` in x's type. Raises ValueError at trace time on shapes that disagree.
    """
    if x_MD.shape[1] != weights_XND.shape[2]:
        raise ValueError(f"rows {x_MD.shape} against matrices {weights_XND.shape}")
    if group_sizes_E.shape[0] > weights_XND.shape[0]:
        raise ValueError(f"{group_sizes_E.shape[0]} groups in a stack of {weights_XND.shape[0]}")
    return grouped_matmul_reference(x_MD, weights_XND, group_sizes_E, first_group, tile_rows=tile_rows)
