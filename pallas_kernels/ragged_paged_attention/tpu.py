"""Ragged paged attention on TPU: sequences of a few rows by one kernel, those of many by another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target, interpreter
from pallas_kernels.eighths import are_widened
from pallas_kernels.page_layout import LANES, PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams
from pallas_kernels.ragged_paged_attention.tpu_chunk import ChunkSizes, attend_chunks
from pallas_kernels.ragged_paged_attention.tpu_few import FewSizes, attend_few
from pallas_kernels.ragged_paged_attention.tpu_softmax import LOG2E

SUBLANES = 8
FEW_TILE = 32
"""Rows of a decode-shaped tile up to which its softmax hides behind the fetch of its pages."""
MAX_FEW_ROWS = 8
FEW_BLOCK_BYTES, CHUNK_BLOCK_BYTES = 1 << 20, 2 << 20
"""Of pages that are fetched and reduced together. Two blocks in flight hide HBM's latency from 512 KiB on;
beyond that a block is as large as makes its iteration long."""
FEW_SCORES = 8 << 10
"""Scores of a block in a decode-shaped tile: an eighth of the vector registers."""
CHUNK_BLOCK_TOKENS = 512
CHUNK_ROWS_AT_ONCE = 256
CHUNK_TILE = 4096
"""Rows of a tile, all heads together: few enough that their state is a small part of the vector memory, and
enough that the scores which a tile's last pair computes for nothing do not count."""
MIN_CHUNK_TILE, MAX_CHUNK_TILE = 512, 2048
MAX_TABLE_BYTES = 512 << 10
"""Half of the scalar memory."""
MAX_SPLIT_SEQUENCES, MIN_SPLIT_TOKENS = 16, 2048
"""Where cores share a sequence's context: of more sequences each has its own, and tables that hold less are
not worth the joining."""
MAX_STEP_BYTES = 2 << 20
"""Queries of a grid step."""


def obstacle(
    layout: PageLayout, params: AttentionParams, table_shape: tuple[int, int], **_: object
) -> str | None:
    """Why the kernels cannot take a cache group or a batch, or None."""
    if params.exact_order:
        return "the exact order of summation is the reference's"
    packing = 4 // jnp.dtype(layout.storage).itemsize
    if layout.storage != layout.kv_format:
        return f"pages of {layout.kv_format} are stored as {layout.storage}"
    if layout.page_size % (SUBLANES * packing):
        return f"pages of {layout.page_size} tokens are no multiple of {SUBLANES * packing}"
    if layout.quantised and layout.scale_lanes != LANES:
        return f"scales of pages of {layout.page_size} tokens do not fill rows of {LANES} lanes"
    if table_shape[1] * 4 > MAX_TABLE_BYTES:
        return f"{table_shape[1]} pages a sequence exceed {MAX_TABLE_BYTES} bytes of scalar memory"
    return None


def attend_tpu(
    q_THh: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table_SP: jax.Array,
    query_start_S1: jax.Array,
    context_len_S: jax.Array,
    first_page: jax.Array | int,
    sinks_H: jax.Array | None,
    *,
    layout: PageLayout,
    params: AttentionParams,
    single: bool,
    target: Target,
    interpret: bool,
    few_sizes: FewSizes | None = None,
    chunk_sizes: ChunkSizes | None = None,
) -> jax.Array:
    """See `ragged_paged_attention`. Sizes are for tests and tuning."""
    pages = pool, scales, page_table_SP
    first_page = jnp.asarray(first_page, jnp.int32)
    shared = {"layout": layout, "params": params, "interpret": interpreter(interpret)}
    shared["eighths"] = (
        layout.kv_format == "float8_e4m3fn" and q_THh.dtype == jnp.bfloat16 and are_widened(target)
    )
    shared["queries_per_kv"] = queries_per_kv = q_THh.shape[1] // layout.num_kv_heads
    num_rows_S = jnp.diff(query_start_S1)
    few_rows = 1 if single else min(MAX_FEW_ROWS, max(1, FEW_TILE // queries_per_kv))
    row_SR = query_start_S1[:-1, None] + jnp.arange(few_rows, dtype=jnp.int32)
    q_SRHh = q_THh[:, None] if single else jnp.take(q_THh, row_SR, axis=0, mode="clip")
    q_SKMW = _few_queries(q_SRHh, layout)
    few_out = _attend_few(
        q_SKMW,
        _sinks(sinks_H, layout, q_SKMW.shape[2]),
        *pages,
        context_len_S - num_rows_S,
        jnp.where((num_rows_S > 0) & (num_rows_S <= few_rows), context_len_S, 0),
        first_page,
        one_row=few_rows == 1,
        sizes=few_sizes,
        target=target,
        **shared,
    )
    few_SRHh = few_out[:, :, : few_rows * queries_per_kv].reshape(
        -1, layout.num_kv_heads, few_rows, queries_per_kv, few_out.shape[-1]
    )
    few_SRHh = _value_lanes(jnp.swapaxes(few_SRHh, 1, 2).reshape(*q_SRHh.shape[:3], -1), layout)
    if single:
        return few_SRHh[:, 0]
    sizes = chunk_sizes or choose_chunk_sizes(
        q_THh.shape[0], queries_per_kv, layout, page_table_SP.shape[1], target
    )
    q_KXW = _chunk_queries(q_THh, layout, sizes)
    chunk_out = attend_chunks(
        q_KXW,
        _sinks(sinks_H, layout, sizes.query_rows * queries_per_kv),
        *pages,
        query_start_S1,
        context_len_S,
        num_rows_S > few_rows,
        first_page,
        sizes=sizes,
        **shared,
    )
    out_TKGV = jnp.swapaxes(
        chunk_out.reshape(layout.num_kv_heads, -1, queries_per_kv, chunk_out.shape[-1]), 0, 1
    )
    out_THh = _value_lanes(out_TKGV[: q_THh.shape[0]].reshape(*q_THh.shape[:2], -1), layout)
    own_SR = (row_SR < query_start_S1[1:, None]) & (num_rows_S <= few_rows)[:, None]
    # Beyond the array, and so dropped, for rows that are another sequence's, or for the other kernel.
    place_X = jnp.where(own_SR, row_SR, q_THh.shape[0]).reshape(-1)
    return out_THh.at[place_X].set(few_SRHh.reshape(-1, *q_THh.shape[1:]), mode="drop")


def _attend_few(
    q_SKMW: jax.Array,
    sinks_KM: jax.Array | None,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table_SP: jax.Array,
    first_position_S: jax.Array,
    end_S: jax.Array,
    first_page: jax.Array,
    *,
    sizes: FewSizes | None,
    target: Target,
    **settings: Any,
) -> jax.Array:
    """As `attend_few`; where there are few sequences each core has a part of every context."""
    layout, table_pages = settings["layout"], page_table_SP.shape[1]
    num_parts = target.num_cores
    splits = num_parts > 1 and not settings["params"].window and end_S.shape[0] <= MAX_SPLIT_SEQUENCES
    if not splits or table_pages * layout.page_size < MIN_SPLIT_TOKENS:
        sizes = sizes or choose_few_sizes(end_S.shape[0], layout, q_SKMW.shape[2], table_pages, target)
        (out,) = attend_few(
            q_SKMW,
            sinks_KM,
            pool,
            scales,
            page_table_SP,
            first_position_S,
            end_S,
            first_page,
            sizes=sizes,
            **settings,
        )
        return out
    sizes = sizes or choose_few_sizes(
        num_parts * end_S.shape[0], layout, q_SKMW.shape[2], -(-table_pages // num_parts), target
    )
    # Parts are whole blocks. All first ones come first, and so on: a core takes a run of what is in a row.
    per_block = sizes.pages_per_block
    blocks_S = -(-end_S // (per_block * layout.page_size * num_parts))
    width = -(-table_pages // (per_block * num_parts)) * per_block
    begin_CS = jnp.arange(num_parts, dtype=jnp.int32)[:, None] * (blocks_S * per_block)[None]
    page_CSp = begin_CS[:, :, None] + jnp.arange(width, dtype=jnp.int32)
    table_CSp = jnp.take_along_axis(page_table_SP[None], page_CSp, axis=2, mode="clip")
    begin_CS *= layout.page_size
    tokens_S = blocks_S * per_block * layout.page_size
    out, logarithm = attend_few(
        jnp.tile(q_SKMW, (num_parts, 1, 1, 1)),
        None,
        pool,
        scales,
        table_CSp.reshape(-1, width),
        (first_position_S - begin_CS).reshape(-1),
        jnp.clip(end_S - begin_CS, 0, tokens_S).reshape(-1),
        first_page,
        sizes=sizes,
        partial=True,
        **settings,
    )
    out_CSKMW = out.reshape(num_parts, -1, *out.shape[1:])
    return _join(out_CSKMW, logarithm.reshape(num_parts, -1, *logarithm.shape[1:]), sinks_KM).astype(
        q_SKMW.dtype
    )


def _join(out_CSKMW: jax.Array, logarithm_CSKML: jax.Array, sinks_KM: jax.Array | None) -> jax.Array:
    """`[S, K, M, W]`: the parts of each context weighed by their sums of exponentials; then the sinks."""
    logarithm_CSKM1 = logarithm_CSKML[..., :1]
    peak_SKM1 = jnp.max(logarithm_CSKM1, axis=0)
    if sinks_KM is not None:
        sinks_KM1 = sinks_KM[..., None] * LOG2E
        peak_SKM1 = jnp.maximum(peak_SKM1, sinks_KM1)
    weight_CSKM1 = jnp.exp2(logarithm_CSKM1 - peak_SKM1)
    total_SKM1 = jnp.sum(weight_CSKM1, axis=0)
    if sinks_KM is not None:
        total_SKM1 = total_SKM1 + jnp.exp2(sinks_KM1 - peak_SKM1)
    return jnp.sum(out_CSKMW * weight_CSKM1, axis=0) / total_SKM1


def _few_queries(q_SRHh: jax.Array, layout: PageLayout) -> jax.Array:
    """`[S, K, M, W]`: the rows of a sequence with all queries of a kv head, padded to whole sublanes."""
    num_sequences, num_rows = q_SRHh.shape[:2]
    q = _pad_lanes(q_SRHh, layout).reshape(
        num_sequences, num_rows, layout.num_kv_heads, -1, _key_lanes(layout)
    )
    q = jnp.swapaxes(q, 1, 2).reshape(num_sequences, layout.num_kv_heads, -1, _key_lanes(layout))
    return jnp.pad(q, ((0, 0), (0, 0), (0, -q.shape[2] % SUBLANES), (0, 0)))


def _chunk_queries(q_THh: jax.Array, layout: PageLayout, sizes: ChunkSizes) -> jax.Array:
    """`[K, T * G, W]`, T padded to whole tiles for each core."""
    rows = sizes.query_rows * sizes.num_cores
    q = jnp.pad(_pad_lanes(q_THh, layout), ((0, -q_THh.shape[0] % rows), (0, 0), (0, 0)))
    q = jnp.swapaxes(q.reshape(q.shape[0], layout.num_kv_heads, -1, q.shape[-1]), 0, 1)
    return q.reshape(layout.num_kv_heads, -1, q.shape[-1])


def _key_lanes(layout: PageLayout) -> int:
    return max(layout.lanes_per_part, LANES)


def _pad_lanes(q: jax.Array, layout: PageLayout) -> jax.Array:
    """Zeros in the lanes of a key's planes past the head size, those of a value that shares its plane too."""
    return jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, _key_lanes(layout) - q.shape[-1])])


def _value_lanes(out: jax.Array, layout: PageLayout) -> jax.Array:
    first = layout.lanes_per_part if layout.planes == 1 else 0
    return out[..., first : first + layout.head_size]


def _sinks(sinks_H: jax.Array | None, layout: PageLayout, num_rows: int) -> jax.Array | None:
    """`[K, M]`: a sink for each row of a tile, whose rows repeat the queries of their kv head."""
    if sinks_H is None:
        return None
    sinks_KG = sinks_H.astype(jnp.float32).reshape(layout.num_kv_heads, -1)
    return jnp.tile(sinks_KG, (1, -(-num_rows // sinks_KG.shape[1])))[:, :num_rows]


def _pages_per_block(layout: PageLayout, table_pages: int, max_tokens: int, max_bytes: int) -> int:
    """Pages of whole rows of 128 positions: so many tokens and bytes, and what a table holds, at the most."""
    page_bytes = layout.rows * LANES * jnp.dtype(layout.storage).itemsize
    tokens = min(max_tokens, table_pages * layout.page_size, max_bytes // page_bytes * layout.page_size)
    step = max(LANES, layout.page_size)
    return max(step, tokens // step * step) // layout.page_size


def choose_few_sizes(
    num_sequences: int, layout: PageLayout, tile_rows: int, table_pages: int, target: Target
) -> FewSizes:
    """For tiles of so many rows of bfloat16 queries."""
    query_bytes = 2 * layout.num_kv_heads * tile_rows * _key_lanes(layout)
    most = max(1, min(MAX_TABLE_BYTES // 2 // (table_pages * 4), MAX_STEP_BYTES // query_bytes))
    most = min(most, -(-num_sequences // target.num_cores))
    per_step = max(d for d in range(1, most + 1) if num_sequences % d == 0)
    return FewSizes(
        _pages_per_block(layout, table_pages, FEW_SCORES // tile_rows, FEW_BLOCK_BYTES), 3, per_step
    )


def choose_chunk_sizes(
    num_rows: int, queries_per_kv: int, layout: PageLayout, table_pages: int, target: Target
) -> ChunkSizes:
    tile = min(max(CHUNK_TILE // layout.num_kv_heads, MIN_CHUNK_TILE), MAX_CHUNK_TILE)
    wanted = -(-tile // queries_per_kv)
    most = -(-num_rows // target.num_cores)
    # A tile's two halves are whole tiles of the narrowest type.
    step = 32
    rows = max(step, min(wanted, most) // step * step)
    return ChunkSizes(
        query_rows=rows,
        rows_at_once=_at_once(rows * queries_per_kv),
        pages_per_block=_pages_per_block(layout, table_pages, CHUNK_BLOCK_TOKENS, CHUNK_BLOCK_BYTES),
        num_buffers=3,
        num_cores=target.num_cores,
    )


def _at_once(tile_rows: int) -> int:
    """Half of a tile, or a fraction of that, up to CHUNK_ROWS_AT_ONCE, in whole registers."""
    half = tile_rows // 2
    return max(d for d in range(16, CHUNK_ROWS_AT_ONCE + 1, 16) if half % d == 0)
