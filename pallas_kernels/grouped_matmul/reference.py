"""What grouped matmul means, in jnp: a loop over tiles of rows of one group, as many as there are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def grouped_matmul_reference(
    x_MD: jax.Array,
    weights_XND: jax.Array,
    group_sizes_E: jax.Array,
    first_group: jax.Array | int,
    *,
    tile_rows: int,
) -> jax.Array:
    """See `grouped_matmul`. A tile that runs past its group is overwritten there by the next one."""
    num_rows = x_MD.shape[0]
    group_end_E = jnp.cumsum(group_sizes_E)
    tiles_end_E = jnp.cumsum(-(-group_sizes_E // tile_rows))
    padded_x = jnp.pad(x_MD, ((0, tile_rows), (0, 0)))
    out = jnp.zeros((padded_x.shape[0], weights_XND.shape[1]), x_MD.dtype)

    def multiply_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.sum(tiles_end_E <= tile, dtype=jnp.int32)
        size = group_sizes_E[group]
        tiles_before = tiles_end_E[group] - (-(-size // tile_rows))
        row = group_end_E[group] - size + (tile - tiles_before) * tile_rows
        weight_ND = lax.dynamic_index_in_dim(weights_XND, first_group + group, keepdims=False)
        product = jnp.einsum(
            "md,nd->mn",
            lax.dynamic_slice_in_dim(padded_x, row, tile_rows),
            weight_ND,
            precision="highest" if x_MD.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), row, 0)

    return lax.fori_loop(0, tiles_end_E[-1], multiply_tile, out)[:num_rows]
