"""Ragged paged attention on GPUs of the Hopper generation: a batch cut into tiles, contexts into parts.

Axes beyond those of `gpu_tiles`: B rows of a tile, G queries of a kv head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target, mosaic_gpu_missing
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams

if TYPE_CHECKING:
    from pallas_kernels.ragged_paged_attention.gpu_tiles import Tiles, TileSizes

TILE_ROWS = 64
"""M at the most where one warpgroup has them: what the matrix units multiply at once."""
WIDE_TILE_ROWS = 128
"""M for prompts, whose pages two warpgroups share: otherwise the second-level cache would be the limit."""
WIDE_FROM = 4
"""Rows for each sequence from which a batch is taken to hold prompts."""
ROW_STEP = 8
"""Rows that the copy engine moves together."""
BLOCK_TOKENS = 64
MIN_PART_TOKENS = 512
"""Positions that are worth a thread block of their own."""
MULTIPROCESSORS = 132
"""Of an H100 or H200."""
NUM_BUFFERS = {1: 3, 2: 2}
"""By a number's bytes: as many as let two thread blocks of one warpgroup share a multiprocessor's memory.
Where a key or value has two planes, two buffers are what one thread block of three has room for."""
MANY_BUFFERS = 4
"""Of a thread block of three warpgroups otherwise."""
MAX_HEAD_SIZE = 256
LOG2E = math.log2(math.e)


def obstacle(
    layout: PageLayout,
    params: AttentionParams,
    compute: str,
    queries_per_kv: int,
    capability: str | None,
    **_: object,
) -> str | None:
    """Why the kernel cannot take a cache group or a batch, or None.

    Args:
        compute: the type of queries.
        capability: of the GPU that is traced for, "9.0" say; None where the kernel is interpreted.
    """
    page_size = layout.page_size
    foreign = capability is not None and not capability.startswith("9.")
    reasons = (
        (foreign, f"it is made for compute capability 9.0, not {capability or 'an unknown one'}"),
        (params.exact_order, "the exact order of summation is the reference's"),
        (compute != "bfloat16", f"it computes in bfloat16, not {compute}"),
        (layout.kv_format == "float32", "its pages are not of float32"),
        (layout.storage != layout.kv_format, f"pages of {layout.kv_format} are stored as {layout.storage}"),
        (layout.head_size > MAX_HEAD_SIZE, f"head size {layout.head_size} exceeds {MAX_HEAD_SIZE}"),
        (
            page_size % 16 or (BLOCK_TOKENS % page_size and page_size % BLOCK_TOKENS),
            f"pages of {page_size} tokens do not fill blocks of {BLOCK_TOKENS}",
        ),
        (queries_per_kv > TILE_ROWS, f"{queries_per_kv} queries of a kv head exceed {TILE_ROWS}"),
    )
    return next((reason for holds, reason in reasons if holds), None) or mosaic_gpu_missing()


def attend_gpu(
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
    sizes: TileSizes | None = None,
) -> jax.Array:
    """See `ragged_paged_attention`. Sizes are for tests and tuning."""
    from pallas_kernels.mosaic_gpu import interpreter
    from pallas_kernels.ragged_paged_attention.gpu_tiles import Tiles, attend_tiles

    num_rows, num_heads, _ = q_THh.shape
    num_sequences = page_table_SP.shape[0]
    queries_per_kv = num_heads // layout.num_kv_heads
    wide = not single and layout.planes <= 2 and num_rows >= WIDE_FROM * num_sequences
    most_rows = WIDE_TILE_ROWS if wide else TILE_ROWS
    tile_rows = 1 if single else most_rows // queries_per_kv
    if single:
        tiles = Tiles(jnp.arange(num_sequences, dtype=jnp.int32), context_len_S - 1, context_len_S)
        row_NB = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        place_T = jnp.arange(num_rows, dtype=jnp.int32)
    else:
        tiles, row_NB, place_T = _cut(query_start_S1, context_len_S, num_rows, tile_rows)
    num_tiles = row_NB.shape[0]
    sizes = sizes or choose_sizes(num_tiles, layout, page_table_SP.shape[1], wide=wide)
    partial = sizes.num_parts > 1 or sinks_H is not None
    q_NBHh = q_THh[:, None] if single else jnp.take(q_THh, row_NB, axis=0, mode="clip")
    out, logarithm = attend_tiles(
        _as_tiles(q_NBHh, layout, WIDE_TILE_ROWS if wide else ROW_STEP),
        tiles,
        pool,
        scales,
        page_table_SP,
        jnp.asarray(first_page, jnp.int32),
        layout=layout,
        params=params,
        queries_per_kv=queries_per_kv,
        sizes=sizes,
        partial=partial,
        interpret=interpreter() if interpret else None,
    )
    out_NKEMW = out[:, :, 0] if logarithm is None else _join(out, logarithm, sinks_H, layout)
    out_RHh = _as_rows(out_NKEMW, tile_rows, queries_per_kv, layout).astype(q_THh.dtype)
    return out_RHh if single else jnp.take(out_RHh, place_T, axis=0, mode="clip")


def _cut(
    query_start_S1: jax.Array, context_len_S: jax.Array, num_rows: int, tile_rows: int
) -> tuple[Tiles, jax.Array, jax.Array]:
    """Each sequence's rows cut into tiles: the tiles, their rows `[N, B]`, each row's place among those."""
    from pallas_kernels.ragged_paged_attention.gpu_tiles import Tiles

    num_sequences = context_len_S.shape[0]
    num_rows_S = jnp.diff(query_start_S1)
    tiles_end_S = jnp.cumsum(-(-num_rows_S // tile_rows))
    tiles_before_S = jnp.concatenate([jnp.zeros((1,), tiles_end_S.dtype), tiles_end_S[:-1]])
    tile_N = jnp.arange(num_rows // tile_rows + num_sequences, dtype=jnp.int32)
    sequence_N = jnp.sum(tiles_end_S[None] <= tile_N[:, None], axis=1, dtype=jnp.int32)
    used_N = sequence_N < num_sequences
    sequence_N = jnp.minimum(sequence_N, num_sequences - 1)
    skipped_N = (tile_N - tiles_before_S[sequence_N]) * tile_rows
    first_N = context_len_S[sequence_N] - num_rows_S[sequence_N] + skipped_N
    end_N = jnp.where(used_N, jnp.minimum(first_N + tile_rows, context_len_S[sequence_N]), 0)
    row_NB = (query_start_S1[sequence_N] + skipped_N)[:, None] + jnp.arange(tile_rows, dtype=jnp.int32)
    row_T = jnp.arange(num_rows, dtype=jnp.int32)
    sequence_T = jnp.sum(query_start_S1[None, 1:] <= row_T[:, None], axis=1, dtype=jnp.int32)
    sequence_T = jnp.minimum(sequence_T, num_sequences - 1)
    place_T = tiles_before_S[sequence_T] * tile_rows + row_T - query_start_S1[sequence_T]
    return Tiles(sequence_N, jnp.where(used_N, first_N, 0), end_N), row_NB, place_T


def _planes(layout: PageLayout) -> tuple[int, int]:
    """E and W."""
    num_planes = max(1, layout.planes // 2)
    return num_planes, layout.lanes_per_part // num_planes


def _as_tiles(q_NBHh: jax.Array, layout: PageLayout, step: int) -> jax.Array:
    """`[N, K, E, M, W]`, M padded to a multiple of `step`."""
    num_tiles, tile_rows = q_NBHh.shape[:2]
    num_planes, width = _planes(layout)
    q = jnp.pad(q_NBHh, ((0, 0), (0, 0), (0, 0), (0, num_planes * width - layout.head_size)))
    q = q.reshape(num_tiles, tile_rows, layout.num_kv_heads, -1, num_planes, width)
    q = jnp.transpose(q, (0, 2, 4, 1, 3, 5)).reshape(num_tiles, layout.num_kv_heads, num_planes, -1, width)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -q.shape[3] % step), (0, 0)))


def _as_rows(out_NKEMW: jax.Array, tile_rows: int, queries_per_kv: int, layout: PageLayout) -> jax.Array:
    """`[N * B, H, h]`."""
    num_tiles, num_kv_heads, num_planes, _, width = out_NKEMW.shape
    out = out_NKEMW[:, :, :, : tile_rows * queries_per_kv]
    out = out.reshape(num_tiles, num_kv_heads, num_planes, tile_rows, queries_per_kv, width)
    out = jnp.transpose(out, (0, 3, 1, 4, 2, 5))
    out = out.reshape(num_tiles * tile_rows, num_kv_heads * queries_per_kv, num_planes * width)
    return out[..., : layout.head_size]


def _join(
    out_NKCEMW: jax.Array, logarithm_NKCM: jax.Array, sinks_H: jax.Array | None, layout: PageLayout
) -> jax.Array:
    """`[N, K, E, M, W]`: the parts of each context weighed by their sums of exponentials; then the sinks."""
    peak_NKM = jnp.max(logarithm_NKCM, axis=2)
    weight_NKCM = jnp.exp2(logarithm_NKCM - peak_NKM[:, :, None])
    total_NKM = jnp.sum(weight_NKCM, axis=2)
    out = jnp.sum(out_NKCEMW * weight_NKCM[:, :, :, None, :, None], axis=2)
    if sinks_H is not None:
        sinks_KG = sinks_H.astype(jnp.float32).reshape(layout.num_kv_heads, -1) * LOG2E
        num_rows = peak_NKM.shape[-1]
        sinks_KM = jnp.tile(sinks_KG, (1, -(-num_rows // sinks_KG.shape[1])))[:, :num_rows]
        total_NKM = total_NKM + jnp.exp2(sinks_KM[None] - peak_NKM)
    return out / total_NKM[:, :, None, :, None]


def choose_sizes(num_tiles: int, layout: PageLayout, table_pages: int, *, wide: bool) -> TileSizes:
    """For so many tiles, `wide` ones or not, and tables of so many pages."""
    from pallas_kernels.ragged_paged_attention.gpu_tiles import TileSizes

    longest = table_pages * layout.page_size
    num_warpgroups = 2 if wide or layout.planes > 2 else 1
    # No more than run at once.
    most_parts = MULTIPROCESSORS * (3 - num_warpgroups) // (num_tiles * layout.num_kv_heads)
    num_parts = max(1, min(most_parts, longest // MIN_PART_TOKENS))
    num_buffers = MANY_BUFFERS if wide else NUM_BUFFERS[jnp.dtype(layout.storage).itemsize]
    if layout.planes > 2:
        num_buffers = 2
    return TileSizes(BLOCK_TOKENS, num_buffers, num_parts, num_warpgroups)
