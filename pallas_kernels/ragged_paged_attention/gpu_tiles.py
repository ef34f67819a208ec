"""The GPU kernel (Hopper, through Mosaic GPU): tiles of query rows against the pages of their sequences.

A tile is some consecutive rows of one sequence with all queries of a kv head, at least 64 rows for the matrix
units, and a thread block reduces one tile of one head over a part of its context. The copy engine fetches
pages into a ring of buffers, as many blocks ahead as there are buffers.

Axes: N tiles, K kv heads, C parts of a context, M rows of a tile, E planes of a key or a value, W lanes of a
plane, t positions of a block.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import COMPILER_PARAMS, load_as, matrix_tile
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams

Ref = Any
"""A reference to memory inside a kernel."""
Carry = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]
"""Unnormalised output, `[64, lanes]` for each of its chunks; highest score and sum of weights `[64]`."""

WARPGROUP_ROWS = 64
"""Rows of a product that the four warps of a warpgroup compute together."""
LOG2E = math.log2(math.e)
MASKED = -1e30
"""Finite, so that a row that has seen nothing yet yields numbers: what it sums until then has a decay of
zero at the first position that it does see."""
MATRIX = plgpu.Layout.WGMMA
WIDENED = plgpu.Layout.WGMMA_UPCAST_2X
"""In which numbers of eight bits are read without conflicts between the banks of shared memory."""
PER_ROW, PER_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)


@dataclass(frozen=True)
class TileSizes:
    """What is tuned."""

    block_tokens: int
    """t: a multiple of the page's tokens or a divisor of them."""
    num_buffers: int
    num_parts: int
    """C."""


class Tiles(NamedTuple):
    """What each tile is, int32 `[N]`."""

    sequence: jax.Array
    first_position: jax.Array
    """Of its first row."""
    end: jax.Array
    """The position after the last that any row sees; 0 for a tile without rows."""

    def low(self, window: int) -> jax.Array:
        """The first position that any row sees."""
        return jnp.maximum(self.first_position - window + 1, 0) if window else jnp.zeros_like(self.end)


# Compiled apart, so that a model's layers share one lowering, which takes a second.
@functools.partial(
    jax.jit, static_argnames=("layout", "params", "queries_per_kv", "sizes", "partial", "interpret")
)
def attend_tiles(
    q_NKEMW: jax.Array,
    tiles: Tiles,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table_SP: jax.Array,
    first_page: jax.Array,
    *,
    layout: PageLayout,
    params: AttentionParams,
    queries_per_kv: int,
    sizes: TileSizes,
    partial: bool,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Each row's attention `[N, K, C, E, M, W]`, a tile without rows getting zeros.

    Args:
        q_NKEMW: bfloat16 queries; row m is that of query m % queries_per_kv of row m // queries_per_kv. M is
            a multiple of 8 up to 64. Lanes past the head size are zero.
        first_page: int32 scalar.
        partial: whether parts are to be joined: results are float32, and there are also the logarithms, in
            base two, of each row's sum of exponentials, `[N, K, C, M]`.

    See `ragged_paged_attention` for the rest.
    """
    num_tiles, num_heads, num_planes, num_rows, width = q_NKEMW.shape
    shape = num_tiles, num_heads, sizes.num_parts
    out_type = jnp.dtype(jnp.float32) if partial else q_NKEMW.dtype
    low, block = tiles.low(params.window), sizes.block_tokens
    facts = [tiles.sequence, tiles.first_position, tiles.end, low, low // block, -(-tiles.end // block)]
    operands = [
        first_page.reshape(1),
        jnp.stack(facts, axis=1).astype(jnp.int32),
        page_table_SP,
        q_NKEMW,
        pool,
        *([] if scales is None else [scales.reshape(scales.shape[0], -1)]),
    ]
    results = [jax.ShapeDtypeStruct((*shape, num_planes, num_rows, width), out_type)]
    if partial:
        results.append(jax.ShapeDtypeStruct((*shape, num_rows), jnp.float32))
    scratch = _scratch(layout, sizes, num_planes, width, out_type if partial else None)
    names = ["first_page", "tiles", "table", "q", "pool", *([] if scales is None else ["scales"]), "out"]
    names += ["logarithm"] if partial else []

    def paged_attention(*refs: Ref) -> None:
        named = dict(zip([*names, *scratch], refs, strict=True))
        pages = named.pop("pages")
        if partial:
            pages, (named["out_tile"],) = pages
        named["keys"], named["values"] = pages
        _Program(named, layout, params, sizes, queries_per_kv).run()

    outputs = plgpu.kernel(
        paged_attention,
        out_type=tuple(results),
        grid=shape,
        grid_names=("tile", "head", "part"),
        scratch_types=list(scratch.values()),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands)
    return (outputs[0], outputs[1]) if partial else (outputs[0], None)


def _scratch(
    layout: PageLayout, sizes: TileSizes, num_planes: int, width: int, staged: jnp.dtype | None
) -> dict[str, Any]:
    """Shared memory and barriers by name."""
    ring = sizes.num_buffers, num_planes, sizes.block_tokens
    compute = jnp.bfloat16
    stored = jnp.dtype(layout.storage)
    pieces = num_pieces(layout, sizes)
    pages = matrix_tile((*ring, width), stored), matrix_tile((*ring, width), stored)
    if staged is not None:
        # Results are staged where pages were.
        out_tile = matrix_tile((num_planes, WARPGROUP_ROWS, width), staged)
        pages = plgpu.RefUnion(pages, (out_tile,))
    scratch = {
        "q_tile": matrix_tile((num_planes, WARPGROUP_ROWS, width), compute),
        "pages": pages,
        "weights": matrix_tile((WARPGROUP_ROWS, sizes.block_tokens), compute),
        "q_barrier": plgpu.Barrier(num_arrivals=num_planes),
    }
    arrivals = pieces * num_planes
    if layout.quantised:
        scratch["wide_keys"] = matrix_tile((*ring[1:], width), compute)
        scratch["wide_values"] = matrix_tile((*ring[1:], width), compute)
        scratch["key_scales"] = plgpu.SMEM((sizes.num_buffers, sizes.block_tokens), jnp.float32)
        scratch["value_scales"] = plgpu.SMEM((sizes.num_buffers, sizes.block_tokens), jnp.float32)
        arrivals += pieces
    for name in ("key_barriers", "value_barriers"):
        scratch[name] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=sizes.num_buffers)
    if staged is not None:
        scratch["logarithm_tile"] = plgpu.SMEM((WARPGROUP_ROWS,), jnp.float32)
    return scratch


def num_pieces(layout: PageLayout, sizes: TileSizes) -> int:
    """Pages, or parts of one, that a block consists of."""
    return max(1, sizes.block_tokens // layout.page_size)


@dataclass(frozen=True)
class _Program:
    """One thread block's work."""

    refs: dict[str, Ref]
    layout: PageLayout
    params: AttentionParams
    sizes: TileSizes
    queries_per_kv: int

    def run(self) -> None:
        """Fetch the first blocks, reduce all, write the result."""
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        fact = [self.refs["tiles"][tile, i] for i in range(6)]
        work = _Work(lax.axis_index("head"), *fact[:4])
        per_part = lax.div(fact[5] - fact[4] + (self.sizes.num_parts - 1), jnp.int32(self.sizes.num_parts))
        first = jnp.minimum(fact[4] + part * per_part, fact[5])
        end = jnp.minimum(first + per_part, fact[5])
        num_rows = self.refs["q"].shape[3]
        for plane in range(self._num_planes):
            plgpu.copy_gmem_to_smem(
                self.refs["q"].at[tile, work.head, plane],
                self.refs["q_tile"].at[plane, pl.ds(0, num_rows)],
                self.refs["q_barrier"],
            )
        for slot in range(self.sizes.num_buffers):

            @pl.when(first + slot < end)
            def _(slot: int = slot) -> None:
                self._fetch(work, first + slot, jnp.int32(slot))

        plgpu.barrier_wait(self.refs["q_barrier"])

        def step(block: jax.Array, carry: Carry) -> Carry:
            slot = lax.rem(block - first, jnp.int32(self.sizes.num_buffers))
            carry = self._reduce(work, block, slot, carry)
            # All four warps are through with the buffer before the copy engine fills it anew.
            plgpu.commit_smem()

            @pl.when(block + self.sizes.num_buffers < end)
            def _() -> None:
                self._fetch(work, block + self.sizes.num_buffers, slot)

            return carry

        carry = lax.fori_loop(first, end, step, self._nothing_seen())
        self._write(tile, work.head, part, carry)

    @property
    def _num_planes(self) -> int:
        return self.refs["q"].shape[2]

    @property
    def _width(self) -> int:
        return self.refs["q"].shape[4]

    @property
    def _chunk_lanes(self) -> int:
        """Lanes of a product: few where the results of two planes already take 128 registers a thread."""
        return self._width if self._num_planes == 1 else WARPGROUP_ROWS

    def _chunks(self) -> list[tuple[int, Any]]:
        """Plane and lanes of each chunk of the output."""
        lanes = self._chunk_lanes
        return [
            (plane, pl.ds(first, lanes))
            for plane in range(self._num_planes)
            for first in range(0, self._width, lanes)
        ]

    def _nothing_seen(self) -> Carry:
        shape = WARPGROUP_ROWS, self._chunk_lanes
        zeros = [plgpu.layout_cast(jnp.full(shape, 0.0, jnp.float32), MATRIX) for _ in self._chunks()]
        peak, total = (
            plgpu.layout_cast(jnp.full(shape[:1], value, jnp.float32), PER_ROW) for value in (MASKED, 0.0)
        )
        return tuple(zeros), peak, total

    def _fetch(self, work: _Work, block: jax.Array, slot: jax.Array) -> None:
        """Begin to copy a block's pages into a buffer."""
        refs, layout = self.refs, self.layout
        page_size, num_planes, width = layout.page_size, self._num_planes, self._width
        table_pages = refs["table"].shape[1]
        pieces = num_pieces(layout, self.sizes)
        piece = self.sizes.block_tokens // pieces
        per_page = page_size // piece

        def piece_of(row: jax.Array) -> Any:
            """One of a page's pieces: JAX 0.10.2 must see what its start is a multiple of."""
            return pl.ds((row * per_page + within) * piece, piece)

        for i in range(pieces):
            number = block * pieces + i
            # Past the table's end any page will do: none of its positions is seen.
            entry = jnp.minimum(lax.div(number, jnp.int32(per_page)), table_pages - 1)
            page = refs["table"][work.sequence, entry] + refs["first_page"][0]
            within = lax.rem(number, jnp.int32(per_page))
            place = pl.ds(i * piece, piece)
            for part, (buffer, barriers) in enumerate(
                (("keys", "key_barriers"), ("values", "value_barriers"))
            ):
                barrier = refs[barriers].at[slot]
                for plane in range(num_planes):
                    # Of a plane that key and value share, each has half of the lanes.
                    shared = layout.planes == 1
                    rows = piece_of(work.head * layout.planes + (0 if shared else part * num_planes + plane))
                    lanes = pl.ds(part * width if shared else 0, width)
                    plgpu.copy_gmem_to_smem(
                        refs["pool"].at[page, rows, lanes], refs[buffer].at[slot, plane, place], barrier
                    )
                if layout.quantised:
                    plgpu.copy_gmem_to_smem(
                        refs["scales"].at[page, piece_of(work.head * 2 + part)],
                        refs["value_scales" if part else "key_scales"].at[slot, place],
                        barrier,
                    )

    def _reduce(self, work: _Work, block: jax.Array, slot: jax.Array, carry: Carry) -> Carry:
        """Take a block into the sums."""
        refs, tokens = self.refs, self.sizes.block_tokens
        outs, peak, total = carry
        start = block * tokens
        plgpu.barrier_wait(refs["key_barriers"].at[slot])
        keys = self._wide("keys", "wide_keys", slot)
        score = self._scores(keys)
        if self.layout.quantised:
            score = score * self._per_column("key_scales", slot)
        visible = self._visible(work, start)
        score = jnp.where(visible, self._capped(score), MASKED)
        new_peak = jnp.maximum(peak, jnp.max(score, axis=1))
        weight = jnp.exp2(score - lax.broadcast_in_dim(new_peak, score.shape, [0]))
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + jnp.sum(weight, axis=1)
        plgpu.barrier_wait(refs["value_barriers"].at[slot])
        if self.layout.quantised:
            # The scale of a position that nobody wrote may be NaN.
            weight = jnp.where(visible, weight * self._per_column("value_scales", slot), 0.0)
        refs["weights"][...] = weight.astype(jnp.bfloat16)
        values = self._wide("values", "wide_values", slot)
        self._drop_unwritten(work, start, values)
        plgpu.commit_smem()
        decayed = lax.broadcast_in_dim(decay, outs[0].shape, [0])
        outs = tuple(
            out * decayed
            + self._product(
                (WARPGROUP_ROWS, self._chunk_lanes), [(refs["weights"], values.at[plane, :, lanes])]
            )
            for (plane, lanes), out in zip(self._chunks(), outs, strict=True)
        )
        return outs, new_peak, total

    def _wide(self, name: str, wide: str, slot: jax.Array) -> Ref:
        """A buffer's block `[E, t, W]` as operands of a product."""
        ref = self.refs[name].at[slot]
        if not self.layout.quantised:
            return ref
        for plane in range(self._num_planes):
            for first in range(0, self.sizes.block_tokens, WARPGROUP_ROWS):
                rows = pl.ds(first, WARPGROUP_ROWS)
                stored = load_as(ref.at[plane, rows], WIDENED)
                # Hopper does not convert from float8 to bfloat16 directly.
                if self.layout.kv_format != "int8":
                    stored = stored.astype(jnp.float32)
                self.refs[wide][plane, rows] = plgpu.layout_cast(stored.astype(jnp.bfloat16), MATRIX)
        plgpu.commit_smem()
        return self.refs[wide]

    def _scores(self, keys: Ref) -> jax.Array:
        pairs = [
            (self.refs["q_tile"].at[plane], keys.at[plane].transpose((1, 0)))
            for plane in range(self._num_planes)
        ]
        return self._product((WARPGROUP_ROWS, self.sizes.block_tokens), pairs)

    def _product(self, shape: tuple[int, int], pairs: list[tuple[Ref, Ref]]) -> jax.Array:
        """The sum of the products of pairs, float32."""

        def multiply(accumulator: Ref) -> jax.Array:
            for a, b in pairs:
                plgpu.wgmma(accumulator, a, b)
            plgpu.wgmma_wait(0)
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def _per_column(self, name: str, slot: jax.Array) -> jax.Array:
        scale = load_as(self.refs[name].at[slot], PER_COLUMN)
        return lax.broadcast_in_dim(scale, (WARPGROUP_ROWS, self.sizes.block_tokens), [1])

    def _capped(self, score: jax.Array) -> jax.Array:
        """Scores in base two."""
        params = self.params
        if not params.softcap:
            return score * (params.scale * LOG2E)
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), more precise than the chip's own.
        power = jnp.exp2(score * (2.0 * LOG2E * params.scale / params.softcap))
        return (params.softcap * LOG2E) * (1.0 - 2.0 / (power + 1.0))

    def _visible(self, work: _Work, start: jax.Array) -> jax.Array:
        shape = WARPGROUP_ROWS, self.sizes.block_tokens
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
        position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX) + start
        own = work.first_position + lax.div(row, jnp.int32(self.queries_per_kv))
        visible = position <= jnp.minimum(own, work.end - 1)
        return visible & (position > own - self.params.window) if self.params.window else visible

    def _drop_unwritten(self, work: _Work, start: jax.Array, values: Ref) -> None:
        """Zeros for the values of positions that no row sees, which may be NaN, at either end."""
        if self.layout.kv_format == "int8":
            return
        tokens = self.sizes.block_tokens

        @pl.when((start < work.low) | (start + tokens > work.end))
        def _() -> None:
            for plane in range(self._num_planes):
                for first in range(0, tokens, WARPGROUP_ROWS):
                    rows = values.at[plane, pl.ds(first, WARPGROUP_ROWS)]
                    shape = WARPGROUP_ROWS, self._width
                    position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX) + (start + first)
                    readable = (position >= work.low) & (position < work.end)
                    rows[...] = jnp.where(readable, load_as(rows, MATRIX), jnp.bfloat16(0.0))

    def _write(self, tile: jax.Array, head: jax.Array, part: jax.Array, carry: Carry) -> None:
        refs = self.refs
        outs, peak, total = carry
        num_rows = refs["q"].shape[3]
        staged = refs.get("out_tile", refs["q_tile"])
        divisor = jnp.where(total == 0.0, 1.0, total)
        for (plane, lanes), out in zip(self._chunks(), outs, strict=True):
            normalised = out / lax.broadcast_in_dim(divisor, out.shape, [0])
            staged[plane, :, lanes] = normalised.astype(staged.dtype)
        if "logarithm" in refs:
            refs["logarithm_tile"][...] = jnp.where(total == 0.0, MASKED, peak + jnp.log2(divisor))
        plgpu.commit_smem()
        for plane in range(self._num_planes):
            plgpu.copy_smem_to_gmem(
                staged.at[plane, pl.ds(0, num_rows)], refs["out"].at[tile, head, part, plane]
            )
        if "logarithm" in refs:
            plgpu.copy_smem_to_gmem(
                refs["logarithm_tile"].at[pl.ds(0, num_rows)], refs["logarithm"].at[tile, head, part]
            )
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Work:
    """A thread block's head and tile, int32 scalars; see Tiles."""

    head: jax.Array
    sequence: jax.Array
    first_position: jax.Array
    end: jax.Array
    low: jax.Array
