"""The prefill-shaped TPU kernel: tiles of query rows against blocks of pages.

A tile is a fixed piece of the flattened batch, so that queries and results move in blocks of their own;
where several sequences meet in a tile, each is reduced into its own rows. One chain of fetches runs through
all tiles of a core: a tile's first pages are on their way while its predecessor's last ones are reduced.

Axes: T rows, B rows of a tile, G queries of a kv head, M = B * G, K kv heads, S sequences, N tiles, t
positions of a block, W lanes of a query or of a result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_layout import LANES, PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams
from pallas_kernels.ragged_paged_attention.tpu_pages import PageRing, Ref, Scalar, ring_types, split_refs
from pallas_kernels.ragged_paged_attention.tpu_softmax import Softmax


@dataclass(frozen=True)
class ChunkSizes:
    """What is tuned."""

    query_rows: int
    """B."""
    rows_at_once: int
    """Rows of M that go through the softmax together, while the scores of as many more are computed; half of
    M, or a fraction of that."""
    pages_per_block: int
    num_buffers: int
    num_cores: int = 1
    """Cores that share out the tiles."""


SHORT_TABLE_BYTES = 256 << 10
"""Of page tables that are kept in scalar memory whole, a quarter of it. Of a longer one, which stays in HBM,
there is the row of the sequence that is being fetched."""
OPAQUE_ZERO = 5
"""Where a zero lies that the compiler knows nothing of. It takes a load from such an index for one that may
be of anything, and keeps it; one of what was just stored it leaves out, and holds dozens of numbers in
registers for hundreds of bundles, which spills."""


class _Item(NamedTuple):
    """A block of a sequence for a tile."""

    tile: Scalar
    sequence: Scalar
    block: Scalar


def attend_chunks(
    q_KXW: jax.Array,
    sinks_KM: jax.Array | None,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table_SP: jax.Array,
    query_start_S1: jax.Array,
    context_len_S: jax.Array,
    wanted_S: jax.Array,
    first_page: jax.Array,
    *,
    layout: PageLayout,
    params: AttentionParams,
    queries_per_kv: int,
    sizes: ChunkSizes,
    eighths: bool = False,
    interpret: Any = False,
) -> jax.Array:
    """`[K, T * G, V * 128]`: each row's attention, in the lanes of the planes that hold the values.

    Args:
        q_KXW: queries, row T-major; T is a multiple of the tile's rows and of the cores.
        sinks_KM: float32 logits of the attention sinks for the rows of a tile, or None.
        query_start_S1: int32, as in `ragged_paged_attention`.
        wanted_S: bool, False for a sequence to be skipped; its rows get finite numbers without meaning.
        first_page: int32 scalar.
        eighths: whether fp8 is multiplied as EIGHTHs.
    """
    num_heads, num_rows, width = q_KXW.shape
    tile_rows = sizes.query_rows * queries_per_kv
    num_tiles = num_rows // tile_rows
    tables = _tile_tables(query_start_S1, wanted_S & (context_len_S > 0), num_tiles, sizes.query_rows)
    value_lanes = LANES * max(layout.planes // 2, 1)
    per_core = num_tiles // sizes.num_cores
    table_width = -(-page_table_SP.shape[1] // sizes.pages_per_block) * sizes.pages_per_block
    table = jnp.pad(page_table_SP, ((0, 0), (0, table_width - page_table_SP.shape[1])))
    long_table = table.nbytes > SHORT_TABLE_BYTES
    aligned = jnp.pad(table, ((0, 0), (0, -table_width % LANES)))
    table = aligned[:, None] if long_table else table.reshape(-1)
    kernel = functools.partial(
        _kernel,
        layout=layout,
        params=params,
        queries_per_kv=queries_per_kv,
        sizes=sizes,
        num_tiles=num_tiles,
        pages_per_sequence=table_width,
        has_sinks=sinks_KM is not None,
        long_table=long_table,
        eighths=eighths,
    )

    def per_tile(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((num_heads, tile_rows, lanes), lambda core, i, *_: (0, core * per_core + i, 0))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    operands = [table, q_KXW]
    in_specs = [*([in_hbm] if long_table else []), per_tile(width)]
    if sinks_KM is not None:
        operands.append(jnp.broadcast_to(sinks_KM[..., None], (num_heads, tile_rows, LANES)))
        in_specs.append(pl.BlockSpec((num_heads, tile_rows, LANES), lambda *_: (0, 0, 0)))
    operands += [pool, *([scales] if scales is not None else [])]
    in_specs += [in_hbm] * (1 if scales is None else 2)
    state_type = pltpu.VMEM((num_heads, tile_rows, LANES), jnp.float32)
    half_shape = sizes.rows_at_once, sizes.pages_per_block * layout.page_size
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6 if long_table else 7,
            grid=(sizes.num_cores, per_core),
            in_specs=in_specs,
            out_specs=per_tile(value_lanes),
            scratch_shapes=[
                *ring_types(layout, sizes.pages_per_block, sizes.num_buffers),
                pltpu.VMEM((num_heads, tile_rows, value_lanes), jnp.float32),
                state_type,
                state_type,
                pltpu.VMEM((2, *half_shape), jnp.float32),
                *[pltpu.VMEM((1, *half_shape), q_KXW.dtype)] * 2,
                *[pltpu.VMEM((1, sizes.rows_at_once, LANES), jnp.float32)] * 2,
                pltpu.SMEM((OPAQUE_ZERO + 1,), jnp.int32),
                *([pltpu.SMEM((1, table.shape[2]), jnp.int32)] if long_table else []),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_heads, num_rows, value_lanes), q_KXW.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=48 << 20,
        ),
        interpret=interpret,
        name="paged_attention_chunks",
    )(
        first_page.reshape(1),
        query_start_S1,
        jnp.pad(context_len_S, (0, 1)),
        *tables,
        *operands,
    )


def _tile_tables(
    query_start_S1: jax.Array, wanted_S: jax.Array, num_tiles: int, query_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where to go on: int32 `[S + 2]` the first wanted sequence with rows from each one on, S if none;
    `[N + 2]` the first such sequence of each tile; `[N + 2]` the first tile with any from each one on."""
    num_sequences = wanted_S.shape[0]
    has_rows_S = wanted_S & (jnp.diff(query_start_S1) > 0)
    number_S = jnp.arange(num_sequences, dtype=jnp.int32)
    next_S = lax.cummin(jnp.where(has_rows_S, number_S, num_sequences), reverse=True)
    next_S = jnp.pad(next_S, (0, 2), constant_values=num_sequences)
    tile_start_N = jnp.arange(num_tiles, dtype=jnp.int32) * query_rows
    first_N = next_S[jnp.sum(query_start_S1[None, 1:] <= tile_start_N[:, None], axis=1, dtype=jnp.int32)]
    start_S = jnp.pad(query_start_S1[:-1], (0, 1), constant_values=jnp.iinfo(jnp.int32).max)
    has_any_N = start_S[first_N] < tile_start_N + query_rows
    number_N = jnp.arange(num_tiles, dtype=jnp.int32)
    next_N = lax.cummin(jnp.where(has_any_N, number_N, num_tiles), reverse=True)
    return (
        next_S,
        jnp.pad(jnp.where(has_any_N, first_N, num_sequences), (0, 2), constant_values=num_sequences),
        jnp.pad(next_N, (0, 2), constant_values=num_tiles),
    )


@dataclass(frozen=True)
class _Work:
    """What the kernel's scalars say of tiles and sequences, and the order of items."""

    query_start_ref: Ref
    context_len_ref: Ref
    next_sequence_ref: Ref
    first_sequence_ref: Ref
    next_tile_ref: Ref
    query_rows: int
    window: int
    block_tokens: int

    @property
    def num_sequences(self) -> int:
        return self.context_len_ref.shape[0] - 1

    def rows(self, item: _Item) -> tuple[Scalar, Scalar]:
        """The first row of the sequence in the tile, and the one after the last."""
        start = item.tile * self.query_rows
        return (
            jnp.maximum(self.query_start_ref[item.sequence], start),
            jnp.minimum(self.query_start_ref[item.sequence + 1], start + self.query_rows),
        )

    def position(self, item: _Item, row: Scalar) -> Scalar:
        """Of a row in its sequence."""
        return self.context_len_ref[item.sequence] - self.query_start_ref[item.sequence + 1] + row

    def span(self, item: _Item) -> tuple[Scalar, Scalar]:
        """The positions [low, high) that rows of the tile see."""
        first, end = self.rows(item)
        low = jnp.maximum(self.position(item, first) - self.window + 1, 0) if self.window else 0
        return low, self.position(item, end)

    def begin_tile(self, tile: Scalar) -> _Item:
        """The first item from a tile on; its tile is one too many if there is none."""
        tile = self.next_tile_ref[tile]
        return self._first_block(tile, self.first_sequence_ref[tile])

    def advance(self, item: _Item) -> _Item:
        """The item after this one; must not be asked of an item past the last."""
        following = self.next_sequence_ref[item.sequence + 1]
        # The entry after the last sequence's is that of all rows.
        in_tile = (following < self.num_sequences) & (
            self.query_start_ref[following] < (item.tile + 1) * self.query_rows
        )
        in_sequence = (item.block + 1) * self.block_tokens < self.span(item)[1]
        tile = jnp.where(in_tile, item.tile, self.next_tile_ref[item.tile + 1])
        sequence = jnp.where(in_tile, following, self.first_sequence_ref[tile])
        after = self._first_block(tile, sequence)
        return _Item(
            jnp.where(in_sequence, item.tile, after.tile),
            jnp.where(in_sequence, item.sequence, after.sequence),
            jnp.where(in_sequence, item.block + 1, after.block),
        )

    def _first_block(self, tile: Scalar, sequence: Scalar) -> _Item:
        if not self.window:
            return _Item(tile, sequence, jnp.int32(0))
        safe = _Item(tile, jnp.minimum(sequence, self.num_sequences - 1), 0)
        low, _ = self.span(safe)
        return _Item(tile, sequence, lax.div(low, self.block_tokens))


@dataclass(frozen=True)
class _Kernel:
    """What one grid step works with."""

    ring: PageRing
    softmax: Softmax
    work: _Work
    q_ref: Ref
    score_ref: Ref
    """float32 [2, rows, t]: scores of a pair's halves."""
    weight_refs: Sequence[Ref]
    """[1, rows, t] for each half; apart, so that stores into one are known not to be into the other."""
    decay_refs: Sequence[Ref]
    """float32 [1, rows, 128], likewise."""
    cursor_ref: Ref
    read_table: Callable[[Scalar, Scalar], None]
    """Makes ready, if a condition holds, for the pages of a sequence to be asked for."""
    page_id: Callable[[Scalar, Scalar], Scalar]
    """From a sequence and a page's number in it to its place in the pool."""
    sizes: ChunkSizes
    queries_per_kv: int
    num_tiles: int

    def start(self, number: Scalar, item: _Item, end_tile: Scalar) -> _Item:
        """Begin to fetch an item, if it is one of the tiles before `end_tile`; returns the next."""
        exists = item.tile < end_tile
        safe = _Item(
            jnp.minimum(item.tile, self.num_tiles - 1),
            jnp.minimum(item.sequence, self.work.num_sequences - 1),
            item.block,
        )
        self.read_table(exists, safe.sequence)
        low, high = self.work.span(safe)
        first_page = jnp.where(exists, safe.block * self.ring.pages_per_block, 0)
        self.ring.start(
            lax.rem(number, self.ring.num_buffers),
            safe.block,
            low,
            jnp.where(exists, high, 0),
            lambda page: self.page_id(safe.sequence, first_page + page),
        )
        after = self.work.advance(safe)
        return _Item(*(jnp.where(exists, new, old) for new, old in zip(after, item, strict=True)))

    def attend(self, number: Scalar, item: _Item) -> None:
        """Reduce an item into the rows of its sequence."""
        ring, work = self.ring, self.work
        slot = lax.rem(number, ring.num_buffers)
        low, high = work.span(item)
        ring.wait(slot, item.block, low, high)
        ring.drop_unwritten(slot, item.block, low, high)
        first, end = work.rows(item)
        block_start = item.block * ring.block_tokens
        all_visible = (end - first == self.sizes.query_rows) & (
            block_start + ring.block_tokens <= work.position(item, first) + 1
        )
        if work.window:
            all_visible &= block_start > work.position(item, end - 1) - work.window
        pl.when(all_visible)(lambda: self._reduce(item, slot, masked=False))
        pl.when(jnp.logical_not(all_visible))(lambda: self._reduce(item, slot, masked=True))

    def _reduce(self, item: _Item, slot: Scalar, masked: bool) -> None:
        """All heads and rows, half a pair at a time: while the matrix units add one's values and compute the
        next but one's scores, the one between them goes through the softmax. All that passes from one to the
        other lies in vector memory, which there is more of than of registers."""
        pairs_per_head = self.q_ref.shape[1] // (2 * self.sizes.rows_at_once)
        num_pairs = self.softmax.layout.num_kv_heads * pairs_per_head
        ring, compute, opaque_zero = self.ring, self.q_ref.dtype, self.cursor_ref[OPAQUE_ZERO]

        def score(pair: Scalar, half: int) -> None:
            head, rows = self._place(pair, half, pairs_per_head)
            keys = [ring.operand(plane, compute) for plane in ring.keys(slot, head)]
            last = self._last_visible(item, rows) if masked else None
            scales, _ = ring.scale_rows(slot, head)
            self.score_ref[half] = self.softmax.scores(self.q_ref[head, rows], keys, scales, last)

        def weigh(pair: Scalar, half: int) -> None:
            head, rows = self._place(pair, half, pairs_per_head)
            _, scales = ring.scale_rows(slot, head)
            state = self.softmax.at(head, rows)
            weight, decay = state.weigh(self.score_ref[half], scales, compute, masked)
            self.weight_refs[half][0] = weight
            self.decay_refs[half][0] = decay

        def add(pair: Scalar, half: int) -> None:
            head, rows = self._place(pair, half, pairs_per_head)
            values = [ring.operand(plane, compute) for plane in ring.values(slot, head)]
            weight, decay = self.weight_refs[half][opaque_zero], self.decay_refs[half][opaque_zero]
            self.softmax.at(head, rows).add(weight, decay, values)

        def reduce_pair(pair: jax.Array, _: None) -> None:
            add(pair, 0)
            weigh(pair, 1)
            score(pair + 1, 0)
            add(pair, 1)
            weigh(pair + 1, 0)
            score(pair + 1, 1)

        score(jnp.int32(0), 0)
        weigh(jnp.int32(0), 0)
        score(jnp.int32(0), 1)
        lax.fori_loop(0, num_pairs - 1, reduce_pair, None)
        add(jnp.int32(num_pairs - 1), 0)
        weigh(jnp.int32(num_pairs - 1), 1)
        add(jnp.int32(num_pairs - 1), 1)

    def _place(self, pair: Scalar, half: int, pairs_per_head: int) -> tuple[Scalar, Any]:
        """The head of half a pair, and its rows of M."""
        size = self.sizes.rows_at_once
        first = pl.multiple_of(lax.rem(pair, pairs_per_head) * (2 * size), 2 * size)
        return lax.div(pair, pairs_per_head), pl.ds(first + half * size, size)

    def _last_visible(self, item: _Item, rows: Any) -> jax.Array:
        """`[rows, 1]`: the last position that each row sees, counted from the block's first."""
        m = lax.broadcasted_iota(jnp.int32, (rows.size, 1), 0) + rows.start
        row = item.tile * self.sizes.query_rows + _quotient(m, self.queries_per_kv)
        first, end = self.work.rows(item)
        position = self.work.position(item, row) - item.block * self.ring.block_tokens
        return jnp.where((row >= first) & (row < end), position, -1)


def _kernel(
    first_page_ref: Ref,  # SMEM [1]
    query_start_ref: Ref,  # SMEM [S + 1]
    context_len_ref: Ref,  # SMEM [S + 1]
    next_sequence_ref: Ref,  # SMEM [S + 2]
    first_sequence_ref: Ref,  # SMEM [N + 2]
    next_tile_ref: Ref,  # SMEM [N + 2]
    table_ref: Ref,  # SMEM [S * P], or HBM [S, 1, P] if it is long
    q_ref: Ref,  # VMEM [K, M, W]
    *refs: Ref,
    layout: PageLayout,
    params: AttentionParams,
    queries_per_kv: int,
    sizes: ChunkSizes,
    num_tiles: int,
    pages_per_sequence: int,
    has_sinks: bool,
    long_table: bool,
    eighths: bool,
) -> None:
    sinks_ref, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    pool_refs, out_ref, ring_refs, rest = split_refs(layout, refs)
    out_state, peak, total, score_ref, *halves, cursor_ref = rest[:-1] if long_table else rest
    ring = PageRing(layout, *pool_refs, *ring_refs, eighths=eighths)
    work = _Work(
        query_start_ref,
        context_len_ref,
        next_sequence_ref,
        first_sequence_ref,
        next_tile_ref,
        sizes.query_rows,
        params.window,
        ring.block_tokens,
    )
    softmax = Softmax(out_state, peak, total, sinks_ref, layout, params, ring.unit)

    def read_table(wanted: Scalar, sequence: Scalar) -> None:
        if long_table:

            @pl.when(wanted & (cursor_ref[4] != sequence))
            def _() -> None:
                pltpu.sync_copy(table_ref.at[sequence], rest[-1])
                cursor_ref[4] = jnp.asarray(sequence, jnp.int32)

    def page_id(sequence: Scalar, page: Scalar) -> Scalar:
        if long_table:
            return rest[-1][0, page] + first_page_ref[0]
        return table_ref[sequence * pages_per_sequence + page] + first_page_ref[0]

    kernel = _Kernel(
        ring,
        softmax,
        work,
        q_ref,
        score_ref,
        halves[:2],
        halves[2:],
        cursor_ref,
        read_table,
        page_id,
        sizes,
        queries_per_kv,
        num_tiles,
    )
    per_core = num_tiles // sizes.num_cores
    tile = pl.program_id(0) * per_core + pl.program_id(1)
    end_tile = (pl.program_id(0) + 1) * per_core

    def step(carry: tuple[Scalar, _Item, _Item]) -> tuple[Scalar, _Item, _Item]:
        number, item, ahead = carry
        ahead = kernel.start(number + ring.num_buffers - 1, ahead, end_tile)
        kernel.attend(number, item)
        return number + 1, work.advance(item), ahead

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        ring.clear()
        cursor_ref[4] = jnp.int32(-1)
        cursor_ref[OPAQUE_ZERO] = jnp.int32(0)
        ahead = lax.fori_loop(
            0,
            ring.num_buffers - 1,
            lambda number, ahead: kernel.start(number, ahead, end_tile),
            work.begin_tile(tile),
        )
        _store(cursor_ref, jnp.int32(0), ahead)

    softmax.reset()
    ahead = _Item(cursor_ref[1], cursor_ref[2], cursor_ref[3])
    first = cursor_ref[0], work.begin_tile(tile), ahead
    number, _past, ahead = lax.while_loop(lambda carry: carry[1].tile == tile, step, first)
    _store(cursor_ref, number, ahead)
    out_ref[...] = softmax.result().astype(out_ref.dtype)


def _store(cursor_ref: Ref, number: Scalar, ahead: _Item) -> None:
    """Keep for the next grid step how many items were reduced, and the next one to fetch."""
    for place, value in enumerate((number, *ahead)):
        cursor_ref[place] = jnp.asarray(value, jnp.int32)


def _quotient(m: jax.Array, divisor: int) -> jax.Array:
    """Of small numbers that are not negative, by way of float32: there is no vector division of integers."""
    return ((m.astype(jnp.float32) + 0.5) * (1.0 / divisor)).astype(jnp.int32)
