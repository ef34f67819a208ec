"""Attention over the paged cache: every device writes and reads the pages of its own KV heads."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.sharding import Mesh

from jaxserve.model.cache import CACHE_AXES, CacheGroup
from jaxserve.model.rows import Rows
from pallas_kernels.dispatch import Target
from pallas_kernels.kv_write import kv_write
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention import AttentionParams, ragged_paged_attention
from sharding import per_shard, shard_size

HEAD_AXES = (None, "kv_heads", None)
"""Logical axes of queries, keys and values: query heads are grouped by KV head."""


def write_and_attend(
    q_THh: jax.Array,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    pages: CacheGroup,
    rows: Rows,
    group: int,
    first_page: jax.Array,
    *,
    layout: PageLayout,
    params: AttentionParams,
    single: bool,
    mesh: Mesh | None,
    target: Target,
) -> tuple[jax.Array, CacheGroup]:
    """`[T, H, h]`: attention of each row, and the pages with this step's keys and values written.

    Args:
        q_THh, k_TKh, v_TKh: rotary already applied.
        pages: the layer's cache group, donated by the caller's step.
        rows: the batch.
        group: the number of the cache group.
        first_page: int32 scalar, the layer's offset in the pool.
        layout: the group's, over all KV heads.
        params: the static half of the attention.
        single: every sequence has exactly one row.
        mesh: the devices over which KV heads are spread.
        target: their kind.

    Raises ValueError at trace time if the mesh does not divide the KV heads.
    """
    own_heads = shard_size("kv_heads", layout.num_kv_heads, mesh)
    run = per_shard(
        functools.partial(
            _write_and_attend_own,
            group=group,
            layout=dataclasses.replace(layout, num_kv_heads=own_heads),
            params=params,
            single=single,
            target=target,
        ),
        mesh,
        in_axes=(HEAD_AXES, HEAD_AXES, HEAD_AXES, CACHE_AXES, (), ()),
        out_axes=HEAD_AXES,
    )
    return run(q_THh, k_TKh, v_TKh, pages, rows, first_page)


def _write_and_attend_own(
    q_THh: jax.Array,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    pages: CacheGroup,
    rows: Rows,
    first_page: jax.Array,
    *,
    group: int,
    layout: PageLayout,
    params: AttentionParams,
    single: bool,
    target: Target,
) -> tuple[jax.Array, CacheGroup]:
    """The same for some of the KV heads."""
    pool, scales = kv_write(
        pages.pool,
        pages.scales,
        k_TKh,
        v_TKh,
        rows.page_TG[group] + first_page,
        rows.position_T % layout.page_size,
        layout=layout,
    )
    mixed_THh = ragged_paged_attention(
        q_THh,
        pool,
        scales,
        rows.page_table[group],
        rows.query_start_S1,
        rows.context_len_S,
        first_page,
        layout=layout,
        params=params,
        single=single,
        target=target,
    )
    return mixed_THh, CacheGroup(pool, scales)
