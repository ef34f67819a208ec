"""What the KV write means, in jnp: one scatter of 128-lane rows, which XLA does in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.page_layout import LANES, PageLayout


def kv_write_reference(
    pool: jax.Array,
    scales: jax.Array | None,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    layout: PageLayout,
    **_: object,
) -> tuple[jax.Array, jax.Array | None]:
    """See `kv_write`."""
    if scales is not None:
        k_TKh, k_scale_TK = layout.quantise(k_TKh)
        v_TKh, v_scale_TK = layout.quantise(v_TKh)
        part = jnp.arange(2 * layout.num_kv_heads, dtype=jnp.int32)
        place_Tx = part[None] * layout.page_size + offset_T[:, None]
        scales = scales.at[
            page_T[:, None], place_Tx // layout.scale_lanes, place_Tx % layout.scale_lanes
        ].set(jnp.stack([k_scale_TK, v_scale_TK], -1).reshape(place_Tx.shape), mode="promise_in_bounds")
    plane_TKE = layout.join(k_TKh, v_TKh)
    plane = jnp.arange(layout.num_kv_heads * layout.planes, dtype=jnp.int32)
    row_TKE = (page_T[:, None] * layout.rows + offset_T[:, None]) + plane[None] * layout.page_size
    flat = pool.reshape(-1, LANES)
    flat = flat.at[row_TKE.reshape(-1)].set(
        layout.to_storage(plane_TKE.reshape(-1, LANES)), mode="promise_in_bounds"
    )
    return flat.reshape(pool.shape), scales
