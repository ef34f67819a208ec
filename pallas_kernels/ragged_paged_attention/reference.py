"""What ragged paged attention means, in jnp; also the CPU implementation.

Both forms reduce a row's context in blocks of fixed size with the online softmax of FlashAttention (Dao et
al. 2022, section 3.1). A block that is wholly masked changes nothing, to the last bit, so it does not matter
to a row how long its neighbours are or how its prompt was cut.

Axes: N tiles, B query rows of a tile, K kv heads, G queries of a kv head, R = B * G, h head size, t positions
of a block, p pages of a block, E planes of a kv head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.page_layout import LANES, PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams

MASKED = -1e30

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Unnormalised output `[N, K, R, h]`, highest score and sum of weights `[N, K, R]` so far."""


def attend_reference(
    q_THh: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table_SP: jax.Array,
    query_start_S1: jax.Array,
    context_len_S: jax.Array,
    first_page: jax.Array | int,
    sinks_H: jax.Array | None = None,
    *,
    layout: PageLayout,
    params: AttentionParams,
    single: bool,
    sums: Sums | None = None,
    **_: object,
) -> jax.Array:
    """See `ragged_paged_attention`. `sums`: in place of those by dots, or in exact order."""
    sums = sums or (EXACT if params.exact_order else DOTS)
    pages = _Pages(pool, scales, first_page, sinks_H, layout, params, sums)
    if single:
        return _attend_single(q_THh, pages, page_table_SP, context_len_S)
    return _attend_ragged(q_THh, pages, page_table_SP, query_start_S1, context_len_S)


@dataclass(frozen=True)
class Sums:
    """The two sums of a block, in float32."""

    scores: Callable[[jax.Array, jax.Array], jax.Array]
    """`[N, K, R, t]` of queries `[N, K, R, h]` and keys `[N, K, t, h]`."""
    mix: Callable[[jax.Array, jax.Array], jax.Array]
    """`[N, K, R, h]` of weights `[N, K, R, t]` and values `[N, K, t, h]`."""


@dataclass(frozen=True)
class _Pages:
    """What is the same for all rows."""

    pool: jax.Array
    scales: jax.Array | None
    first_page: jax.Array | int
    sinks_H: jax.Array | None
    layout: PageLayout
    params: AttentionParams
    sums: Sums


def _attend_single(
    q_THh: jax.Array, pages: _Pages, page_table_SP: jax.Array, context_len_S: jax.Array
) -> jax.Array:
    """One row a sequence: all sequences advance through their context blocks together."""
    tiles = _as_tiles(q_THh, pages.layout, 1)
    return _attend_tiles(tiles, pages, page_table_SP, context_len_S - 1, context_len_S).reshape(q_THh.shape)


def _attend_ragged(
    q_THh: jax.Array,
    pages: _Pages,
    page_table_SP: jax.Array,
    query_start_S1: jax.Array,
    context_len_S: jax.Array,
) -> jax.Array:
    """Any number of rows a sequence: a loop over tiles of consecutive rows of one sequence.

    A tile may run past its sequence's last row; what it writes there is overwritten by the next tile,
    since tiles go in the order of rows.
    """
    num_rows, tile_rows = q_THh.shape[0], pages.params.query_tile
    num_rows_S = jnp.diff(query_start_S1)
    tiles_end_S = jnp.cumsum(-(-num_rows_S // tile_rows))
    first_position_S = context_len_S - num_rows_S
    padded_q = jnp.pad(q_THh, ((0, tile_rows), (0, 0), (0, 0)))

    def attend_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
        sequence = jnp.sum(tiles_end_S <= tile, dtype=jnp.int32)
        tiles_before = jnp.where(sequence > 0, tiles_end_S[sequence - 1], 0)
        skipped = (tile - tiles_before) * tile_rows
        row = query_start_S1[sequence] + skipped
        q = lax.dynamic_slice_in_dim(padded_q, row, tile_rows)
        attended = _attend_tiles(
            _as_tiles(q, pages.layout, tile_rows),
            pages,
            lax.dynamic_slice_in_dim(page_table_SP, sequence, 1),
            (first_position_S[sequence] + skipped)[None],
            context_len_S[sequence][None],
        )
        return lax.dynamic_update_slice_in_dim(out, attended.reshape(q.shape), row, 0)

    out = lax.fori_loop(0, tiles_end_S[-1], attend_tile, jnp.zeros_like(padded_q))
    return out[:num_rows]


def _as_tiles(q_THh: jax.Array, layout: PageLayout, num_rows: int) -> jax.Array:
    """`[T, H, h]` as `[N, B, K, G, h]`."""
    num_groups = q_THh.shape[1] // layout.num_kv_heads
    return q_THh.reshape(-1, num_rows, layout.num_kv_heads, num_groups, layout.head_size)


def _attend_tiles(
    q_NBKGh: jax.Array,
    pages: _Pages,
    page_table_NP: jax.Array,
    first_position_N: jax.Array,
    context_len_N: jax.Array,
) -> jax.Array:
    """Tiles of consecutive rows, each against its own sequence; returns `[N, B, K, G, h]`."""
    layout, params = pages.layout, pages.params
    num_tiles, num_rows, num_kv_heads, num_groups, head_size = q_NBKGh.shape
    block, num_pages = params.context_block, params.context_block // layout.page_size
    q_NKRh = jnp.transpose(q_NBKGh, (0, 2, 1, 3, 4)).reshape(num_tiles, num_kv_heads, -1, head_size)
    q_NKRh = q_NKRh.astype(jnp.float32) * params.scale
    row = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), num_groups)
    position_NR = first_position_N[:, None] + row[None]

    def reduce_block(index: jax.Array, carry: Carry) -> Carry:
        out_NKRh, peak_NKR, total_NKR = carry
        page_Np = lax.dynamic_slice_in_dim(page_table_NP, index * num_pages, num_pages, axis=1)
        position_t = index * block + jnp.arange(block, dtype=jnp.int32)
        written_Nt = position_t[None] < context_len_N[:, None]
        k_NKth, v_NKth = _gather_block(pages.pool, pages.scales, page_Np + pages.first_page, layout)
        # A page not written yet, or behind the window and given away, may hold anything, NaN included,
        # which a zero weight would not silence.
        readable_Nt = written_Nt
        if params.window:
            readable_Nt &= position_t[None] > first_position_N[:, None] - params.window
        v_NKth = jnp.where(readable_Nt[:, None, :, None], v_NKth, 0.0)
        visible_NRt = written_Nt[:, None] & (position_t[None, None] <= position_NR[:, :, None])
        if params.window:
            visible_NRt &= position_t[None, None] > position_NR[:, :, None] - params.window
        score_NKRt = pages.sums.scores(q_NKRh, k_NKth)
        if params.softcap:
            score_NKRt = params.softcap * jnp.tanh(score_NKRt / params.softcap)
        visible_NKRt = visible_NRt[:, None]
        score_NKRt = jnp.where(visible_NKRt, score_NKRt, MASKED)
        new_peak_NKR = jnp.maximum(peak_NKR, jnp.max(score_NKRt, axis=-1))
        weight_NKRt = jnp.where(visible_NKRt, jnp.exp(score_NKRt - new_peak_NKR[..., None]), 0.0)
        decay_NKR = jnp.exp(peak_NKR - new_peak_NKR)
        out_NKRh = out_NKRh * decay_NKR[..., None] + pages.sums.mix(weight_NKRt, v_NKth)
        return out_NKRh, new_peak_NKR, total_NKR * decay_NKR + jnp.sum(weight_NKRt, axis=-1)

    first_block = jnp.int32(0)
    if params.window:
        first_block = jnp.maximum(jnp.min(first_position_N) - params.window + 1, 0) // block
    last_position_N = jnp.minimum(first_position_N + num_rows, context_len_N) - 1
    num_blocks = jnp.max(last_position_N) // block + 1
    peak_NKR, total_NKR = _nothing_seen(q_NKRh.shape[:-1], pages.sinks_H)
    carry = jnp.zeros(q_NKRh.shape, jnp.float32), peak_NKR, total_NKR
    out_NKRh, _, total_NKR = lax.fori_loop(first_block, num_blocks, reduce_block, carry)
    out_NKRh = out_NKRh / jnp.where(total_NKR == 0.0, 1.0, total_NKR)[..., None]
    out_NKBGh = out_NKRh.reshape(num_tiles, num_kv_heads, num_rows, num_groups, head_size)
    return jnp.transpose(out_NKBGh, (0, 2, 1, 3, 4)).astype(q_NBKGh.dtype)


def _nothing_seen(shape: tuple[int, ...], sinks_H: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Highest score and sum of weights `[N, K, R]` before the first block: those of the sinks alone."""
    if sinks_H is None:
        return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    sinks_KG = sinks_H.astype(jnp.float32).reshape(shape[1], -1)
    sinks_KR = jnp.tile(sinks_KG, (1, shape[2] // sinks_KG.shape[1]))
    return jnp.broadcast_to(sinks_KR[None], shape), jnp.ones(shape, jnp.float32)


def _dot(a_NKRx: jax.Array, b_NKtx: jax.Array) -> jax.Array:
    return jnp.einsum(
        "nkrx,nktx->nkrt", a_NKRx, b_NKtx, precision="highest", preferred_element_type=jnp.float32
    )


def _multiply_and_reduce(a_NKRx: jax.Array, b_NKtx: jax.Array) -> jax.Array:
    return jnp.sum(a_NKRx[:, :, :, None] * b_NKtx[:, :, None], axis=-1)


DOTS = Sums(_dot, lambda weights, values: _dot(weights, jnp.swapaxes(values, -1, -2)))
EXACT = Sums(
    _multiply_and_reduce,
    lambda weights, values: _multiply_and_reduce(weights, jnp.swapaxes(values, -1, -2)),
)


def _gather_block(
    pool: jax.Array, scales: jax.Array | None, page_Np: jax.Array, layout: PageLayout
) -> tuple[jax.Array, jax.Array]:
    """The keys and values on some pages as float32 `[N, K, t, h]`.

    The gather takes whole heads of pages: contiguous slices that need no transposition afterwards.
    """
    num_kv_heads, planes, page_size = layout.num_kv_heads, layout.planes, layout.page_size
    num_tiles, num_pages = page_Np.shape
    plane = jnp.arange(num_kv_heads * planes, dtype=jnp.int32).reshape(num_kv_heads, planes)
    slice_NKEp = page_Np[:, None, None] * (num_kv_heads * planes) + plane[None, :, :, None]
    slices = pool.reshape(-1, page_size, LANES)
    stored = slices.at[slice_NKEp].get(mode="promise_in_bounds")
    stored = stored.reshape(num_tiles, num_kv_heads, planes, num_pages * page_size, LANES)
    k_NKth, v_NKth = layout.split(layout.from_storage(stored).astype(jnp.float32))
    if scales is not None:
        scale = scales.at[page_Np].get(mode="promise_in_bounds")
        scale_Npx = scale.reshape(num_tiles, num_pages, 2 * num_kv_heads, page_size)
        scale_NK2t = jnp.swapaxes(scale_Npx, 1, 2).reshape(num_tiles, num_kv_heads, 2, -1)
        k_NKth = k_NKth * scale_NK2t[:, :, 0, :, None]
        v_NKth = v_NKth * scale_NK2t[:, :, 1, :, None]
    return k_NKth, v_NKth
