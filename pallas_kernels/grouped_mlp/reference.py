"""What the grouped MLP means, in jnp: a loop over tiles of choices of one group, as many as there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def grouped_mlp_reference(
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
    """See `grouped_mlp`. What a tile reads past its group it drops."""
    num_rows = x_TD.shape[0]
    group_end_E = jnp.cumsum(group_sizes_E)
    tiles_end_E = jnp.cumsum(-(-group_sizes_E // tile_rows))
    padded_row_M = jnp.pad(row_M, (0, tile_rows))
    padded_weight_M = jnp.pad(weight_M, (0, tile_rows))
    lane_m = jnp.arange(tile_rows, dtype=jnp.int32)

    def multiply_tile(tile: jax.Array, out_TD: jax.Array) -> jax.Array:
        group = jnp.sum(tiles_end_E <= tile, dtype=jnp.int32)
        size = group_sizes_E[group]
        tiles_before = tiles_end_E[group] - (-(-size // tile_rows))
        first = group_end_E[group] - size + (tile - tiles_before) * tile_rows
        row_m = lax.dynamic_slice_in_dim(padded_row_M, first, tile_rows)
        weight_m = lax.dynamic_slice_in_dim(padded_weight_M, first, tile_rows)
        gate_up_2FD, down_DF = jax.tree.map(
            lambda stack: lax.dynamic_index_in_dim(stack, first_group + group, keepdims=False),
            (gate_up_X2FD, down_XDF),
        )
        x_mD = x_TD.at[row_m].get(mode="promise_in_bounds")
        hidden_mF = activate(multiply(x_mD, gate_up_2FD).astype(x_TD.dtype))
        product_mD = multiply(hidden_mF, down_DF) * weight_m[:, None]
        # Beyond the array, and no two alike, for choices of the next group.
        target_m = jnp.where(first + lane_m < group_end_E[group], row_m, num_rows + lane_m)
        return out_TD.at[target_m].add(product_mD, mode="drop", unique_indices=True)

    return lax.fori_loop(0, tiles_end_E[-1], multiply_tile, jnp.zeros(x_TD.shape, jnp.float32))
