"""Attention over the paged cache."""

from __future__ import annotations

import jax

from jaxserve.model.cache import CacheGroup
from jaxserve.model.rows import Rows
from pallas_kernels.dispatch import Target
from pallas_kernels.kv_write import kv_write
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention import AttentionParams, ragged_paged_attention


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
    target: Target,
) -> tuple[jax.Array, CacheGroup]:
    """`[T, H, h]`: attention of each row, and the pages with this step's keys and values written.

    Args:
        q_THh, k_TKh, v_TKh: rotary already applied; on a mesh those of one device's heads.
        pages: the layer's cache group, donated by the caller's step; on a mesh one device's part.
        rows: the batch.
        group: the number of the cache group.
        first_page: int32 scalar, the layer's offset in the pool.
        layout: of these pages.
        params: the static half of the attention.
        single: every sequence has exactly one row.
        target: the kind of device.
    """
    pool, scales = kv_write(
        pages.pool,
        pages.scales,
        k_TKh,
        v_TKh,
        rows.page_TG[group] + first_page,
        rows.position_T % layout.page_size,
        layout=layout,
        target=target,
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
