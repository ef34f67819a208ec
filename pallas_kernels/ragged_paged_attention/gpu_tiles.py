"""The GPU kernel (Hopper, through Mosaic GPU): tiles of query rows against the pages of their sequences.

A tile is some consecutive rows of one sequence with all queries of a kv head, and a thread block reduces one
tile of one head over a part of its context. The copy engine fetches pages into a ring of buffers, as many
blocks ahead as there are buffers.

A thread block is one warpgroup for a tile of up to 64 rows, which the matrix units take at once, or three:
two that share what a third one fetches. Those two have 64 rows each, or where values have two planes, which
are more than one's registers hold, a plane each of the same rows.

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
Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Unnormalised output `[64, W]`, highest score and sum of weights `[64]` so far."""

WARPGROUP_ROWS = 64
"""Rows of a product that the four warps of a warpgroup compute together."""
LOG2E = math.log2(math.e)
REGISTERS = {1: (240, 32), 2: (232, 48)}
"""By E, of a thread that reduces and of one that fetches, in a thread block of three warpgroups: all that a
multiprocessor has. Two planes are more copies to be begun."""
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
    num_warpgroups: int = 1
    """That reduce: 2 for tiles of 128 rows, or of any where E is 2."""


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
            a multiple of 8 up to 64, or 128. Lanes past the head size are zero.
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
    split_rows = sizes.num_warpgroups == 2 and num_planes == 1
    groups = 2 if split_rows else 1
    scratch = _scratch(layout, sizes, groups, num_planes, width, out_type if partial else None)
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
        **({} if sizes.num_warpgroups == 1 else {"num_threads": 3, "thread_name": "warpgroup"}),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands)
    return (outputs[0], outputs[1]) if partial else (outputs[0], None)


def _scratch(
    layout: PageLayout, sizes: TileSizes, groups: int, num_planes: int, width: int, staged: jnp.dtype | None
) -> dict[str, Any]:
    """Shared memory and barriers by name, for so many groups of 64 rows."""
    ring = sizes.num_buffers, num_planes, sizes.block_tokens
    compute, number = jnp.bfloat16, sizes.num_warpgroups
    stored = jnp.dtype(layout.storage)
    pieces = num_pieces(layout, sizes)
    tile = groups, num_planes, WARPGROUP_ROWS, width
    pages = matrix_tile((*ring, width), stored), matrix_tile((*ring, width), stored)
    if staged is not None:
        # Results are staged where pages were.
        pages = plgpu.RefUnion(pages, (matrix_tile(tile, staged),))
    scratch = {
        "q_tile": matrix_tile(tile, compute),
        "pages": pages,
        "weights": matrix_tile((number, WARPGROUP_ROWS, sizes.block_tokens), compute),
        "q_barrier": plgpu.Barrier(num_arrivals=groups * num_planes),
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
    if number > 1:
        scratch["released"] = plgpu.Barrier(num_arrivals=number, num_barriers=sizes.num_buffers)
        scratch["together"] = plgpu.Barrier(num_arrivals=number)
    if staged is not None:
        scratch["logarithm_tile"] = plgpu.SMEM((groups, WARPGROUP_ROWS), jnp.float32)
    return scratch


def num_pieces(layout: PageLayout, sizes: TileSizes) -> int:
    """Pages, or parts of one, that a block consists of."""
    return max(1, sizes.block_tokens // layout.page_size)


@dataclass(frozen=True)
class _Work:
    """A thread block's own: int32 scalars; see Tiles."""

    tile: jax.Array
    head: jax.Array
    part: jax.Array
    sequence: jax.Array
    first_position: jax.Array
    end: jax.Array
    low: jax.Array
    first_block: jax.Array
    end_block: jax.Array


@dataclass(frozen=True)
class _Program:
    """What a thread block does."""

    refs: dict[str, Ref]
    layout: PageLayout
    params: AttentionParams
    sizes: TileSizes
    queries_per_kv: int

    def run(self) -> None:
        """Fetch, reduce, write."""
        work = self._work()
        if self.sizes.num_warpgroups == 1:
            self._fetch_queries(work)
            self._reduce_alone(work)
            return
        number = lax.axis_index("warpgroup")

        @pl.when(number == self.sizes.num_warpgroups)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[self._num_planes][1], action="decrease")
            self._fetch_queries(work)
            self._fetch_all(work)

        @pl.when(number < self.sizes.num_warpgroups)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[self._num_planes][0], action="increase")
            zero = jnp.int32(0)
            group, plane = (number, zero) if self._num_planes == 1 else (zero, number)
            _Reduction(self, work, number, group, plane).run_beside_another()

    def _work(self) -> _Work:
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        sequence, first_position, end, low, first_block, end_block = (
            self.refs["tiles"][tile, i] for i in range(6)
        )
        num_parts = self.sizes.num_parts
        per_part = lax.div(end_block - first_block + (num_parts - 1), jnp.int32(num_parts))
        first_block = jnp.minimum(first_block + part * per_part, end_block)
        end_block = jnp.minimum(first_block + per_part, end_block)
        head = lax.axis_index("head")
        return _Work(tile, head, part, sequence, first_position, end, low, first_block, end_block)

    @property
    def _num_planes(self) -> int:
        return self.refs["q"].shape[2]

    @property
    def num_rows(self) -> int:
        """Of a tile that a warpgroup has at the most."""
        return min(self.refs["q"].shape[3], WARPGROUP_ROWS)

    def slot(self, work: _Work, block: jax.Array) -> jax.Array:
        """Which buffer holds a block."""
        return lax.rem(block - work.first_block, jnp.int32(self.sizes.num_buffers))

    def _reduce_alone(self, work: _Work) -> None:
        """One warpgroup does all."""
        zero = jnp.int32(0)
        reduction = _Reduction(self, work, zero, zero, zero)
        for slot in range(self.sizes.num_buffers):

            @pl.when(work.first_block + slot < work.end_block)
            def _(slot: int = slot) -> None:
                self._fetch(work, work.first_block + slot, jnp.int32(slot))

        plgpu.barrier_wait(self.refs["q_barrier"])

        def step(block: jax.Array, carry: Carry) -> Carry:
            slot = self.slot(work, block)
            carry = reduction.absorb(block, slot, carry)
            # All four warps are through with the buffer before the copy engine fills it anew.
            plgpu.commit_smem()

            @pl.when(block + self.sizes.num_buffers < work.end_block)
            def _() -> None:
                self._fetch(work, block + self.sizes.num_buffers, slot)

            return carry

        nothing = reduction.nothing_seen()
        reduction.write(lax.fori_loop(work.first_block, work.end_block, step, nothing))

    def _fetch_queries(self, work: _Work) -> None:
        tile = self.refs["q_tile"]
        for group in range(tile.shape[0]):
            for plane in range(tile.shape[1]):
                rows = pl.ds(group * WARPGROUP_ROWS, self.num_rows)
                plgpu.copy_gmem_to_smem(
                    self.refs["q"].at[work.tile, work.head, plane, rows],
                    tile.at[group, plane, pl.ds(0, self.num_rows)],
                    self.refs["q_barrier"],
                )

    def _fetch_all(self, work: _Work) -> None:
        """Each block as soon as its buffer is free."""

        def step(block: jax.Array, carry: None) -> None:
            slot = self.slot(work, block)

            @pl.when(block - work.first_block >= self.sizes.num_buffers)
            def _() -> None:
                plgpu.barrier_wait(self.refs["released"].at[slot])

            self._fetch(work, block, slot)

        lax.fori_loop(work.first_block, work.end_block, step, None)

    def _fetch(self, work: _Work, block: jax.Array, slot: jax.Array) -> None:
        """Begin to copy a block's pages into a buffer."""
        refs, layout = self.refs, self.layout
        page_size, num_planes, width = layout.page_size, self._num_planes, refs["q"].shape[4]
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


@dataclass(frozen=True)
class _Reduction:
    """What a warpgroup does of it: 64 rows, one plane of their result."""

    program: _Program
    work: _Work
    number: jax.Array
    """The warpgroup's."""
    group: jax.Array
    """Which 64 rows of the tile."""
    plane: jax.Array
    """Which plane of the values."""

    @property
    def refs(self) -> dict[str, Ref]:
        return self.program.refs

    @property
    def layout(self) -> PageLayout:
        return self.program.layout

    @property
    def _tokens(self) -> int:
        return self.program.sizes.block_tokens

    @property
    def _num_planes(self) -> int:
        return self.refs["q_tile"].shape[1]

    @property
    def _width(self) -> int:
        return self.refs["q_tile"].shape[3]

    @property
    def _alone(self) -> bool:
        return self.program.sizes.num_warpgroups == 1

    def run_beside_another(self) -> None:
        """Reduce what a third warpgroup fetches."""
        plgpu.barrier_wait(self.refs["q_barrier"])

        def step(block: jax.Array, carry: Carry) -> Carry:
            slot = self.program.slot(self.work, block)
            carry = self.absorb(block, slot, carry)
            plgpu.barrier_arrive(self.refs["released"].at[slot])
            return carry

        nothing = self.nothing_seen()
        carry = lax.fori_loop(self.work.first_block, self.work.end_block, step, nothing)
        self._meet()
        self.write(carry)

    def nothing_seen(self) -> Carry:
        """Before the first block."""
        shape = WARPGROUP_ROWS, self._width
        peak, total = (
            plgpu.layout_cast(jnp.full(shape[:1], value, jnp.float32), PER_ROW) for value in (MASKED, 0.0)
        )
        return plgpu.layout_cast(jnp.full(shape, 0.0, jnp.float32), MATRIX), peak, total

    def absorb(self, block: jax.Array, slot: jax.Array, carry: Carry) -> Carry:
        """Take a block into the sums."""
        refs = self.refs
        out, peak, total = carry
        start = block * self._tokens
        keys, values = self._operands(slot)
        score = self._scores(keys)
        if self.layout.quantised:
            score = score * self._per_column("key_scales", slot)
        visible = self._visible(start)
        score = jnp.where(visible, self._capped(score), MASKED)
        new_peak = jnp.maximum(peak, jnp.max(score, axis=1))
        weight = jnp.exp2(score - lax.broadcast_in_dim(new_peak, score.shape, [0]))
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + jnp.sum(weight, axis=1)
        if self.layout.quantised:
            # The scale of a position that nobody wrote may be NaN.
            weight = jnp.where(visible, weight * self._per_column("value_scales", slot), 0.0)
        else:
            plgpu.barrier_wait(refs["value_barriers"].at[slot])
        own_weights = refs["weights"].at[self.number]
        own_weights[...] = weight.astype(jnp.bfloat16)
        self._drop_unwritten(start, values)
        plgpu.commit_smem()
        product = self._product((WARPGROUP_ROWS, self._width), [(own_weights, values.at[self.plane])])
        return out * lax.broadcast_in_dim(decay, out.shape, [0]) + product, new_peak, total

    def _meet(self) -> None:
        """Wait until the other warpgroup, if there is one, has come as far."""
        if not self._alone:
            plgpu.barrier_arrive(self.refs["together"])
            plgpu.barrier_wait(self.refs["together"])

    def _operands(self, slot: jax.Array) -> tuple[Ref, Ref]:
        """A block's keys and values `[E, t, W]` as operands of a product.

        Keys are there; values that are not of eight bits have to be waited for.
        """
        refs = self.refs
        plgpu.barrier_wait(refs["key_barriers"].at[slot])
        if not self.layout.quantised:
            return refs["keys"].at[slot], refs["values"].at[slot]
        plgpu.barrier_wait(refs["value_barriers"].at[slot])
        if self._alone:
            self._widen("keys", slot, 0)
            self._widen("values", slot, 0)
        else:
            # The other one is through with the block before.
            self._meet()
            if self._num_planes == 1:
                for number, name in enumerate(("keys", "values")):
                    pl.when(self.number == number)(functools.partial(self._widen, name, slot, 0))
            else:
                self._widen("keys", slot, self.plane)
                self._widen("values", slot, self.plane)
        plgpu.commit_smem()
        self._meet()
        return refs["wide_keys"], refs["wide_values"]

    def _widen(self, name: str, slot: jax.Array, plane: jax.Array | int) -> None:
        """A plane of a buffer's block to bfloat16."""
        for first in range(0, self._tokens, WARPGROUP_ROWS):
            rows = pl.ds(first, WARPGROUP_ROWS)
            stored = load_as(self.refs[name].at[slot, plane, rows], WIDENED)
            # Hopper does not convert from float8 to bfloat16 directly.
            if self.layout.kv_format != "int8":
                stored = stored.astype(jnp.float32)
            wide = self.refs[f"wide_{name}"].at[plane, rows]
            wide[...] = plgpu.layout_cast(stored.astype(jnp.bfloat16), MATRIX)

    def _scores(self, keys: Ref) -> jax.Array:
        pairs = [
            (self.refs["q_tile"].at[self.group, plane], keys.at[plane].transpose((1, 0)))
            for plane in range(self._num_planes)
        ]
        return self._product((WARPGROUP_ROWS, self._tokens), pairs)

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
        return lax.broadcast_in_dim(scale, (WARPGROUP_ROWS, self._tokens), [1])

    def _capped(self, score: jax.Array) -> jax.Array:
        """Scores in base two."""
        params = self.program.params
        if not params.softcap:
            return score * (params.scale * LOG2E)
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), more precise than the chip's own.
        power = jnp.exp2(score * (2.0 * LOG2E * params.scale / params.softcap))
        return (params.softcap * LOG2E) * (1.0 - 2.0 / (power + 1.0))

    def _visible(self, start: jax.Array) -> jax.Array:
        shape = WARPGROUP_ROWS, self._tokens
        work, window = self.work, self.program.params.window
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX) + self.group * WARPGROUP_ROWS
        position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX) + start
        own = work.first_position + lax.div(row, jnp.int32(self.program.queries_per_kv))
        visible = position <= jnp.minimum(own, work.end - 1)
        return visible & (position > own - window) if window else visible

    def _drop_unwritten(self, start: jax.Array, values: Ref) -> None:
        """Zeros for the values of positions that no row sees, which may be NaN, at either end."""
        if self.layout.kv_format == "int8":
            return
        work, tokens = self.work, self._tokens

        @pl.when((start < work.low) | (start + tokens > work.end))
        def _() -> None:
            if self._alone or self._num_planes == 2:
                self._clear(start, values.at[self.plane])
            else:
                # What one of the two does the other one waits for.
                pl.when(self.number == 0)(lambda: self._clear(start, values.at[0]))
                plgpu.commit_smem()
                self._meet()

    def _clear(self, start: jax.Array, values: Ref) -> None:
        work = self.work
        for first in range(0, self._tokens, WARPGROUP_ROWS):
            rows = values.at[pl.ds(first, WARPGROUP_ROWS)]
            shape = WARPGROUP_ROWS, self._width
            position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX) + (start + first)
            readable = (position >= work.low) & (position < work.end)
            rows[...] = jnp.where(readable, load_as(rows, MATRIX), jnp.bfloat16(0.0))

    def write(self, carry: Carry) -> None:
        """The result, and its rows' logarithms if they are wanted."""
        refs, work, num_rows = self.refs, self.work, self.program.num_rows
        out, peak, total = carry
        staged = refs.get("out_tile", refs["q_tile"]).at[self.group, self.plane]
        divisor = jnp.where(total == 0.0, 1.0, total)
        normalised = out / lax.broadcast_in_dim(divisor, out.shape, [0])
        staged[...] = normalised.astype(staged.dtype)
        place = work.tile, work.head, work.part
        rows = pl.ds(self.group * WARPGROUP_ROWS, num_rows)
        if "logarithm" in refs:
            logarithm = refs["logarithm_tile"].at[self.group]

            # Of two warpgroups with the same rows, one.
            @pl.when(self.plane == 0)
            def _() -> None:
                logarithm[...] = jnp.where(total == 0.0, MASKED, peak + jnp.log2(divisor))

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, num_rows)], refs["out"].at[*place, self.plane, rows])
        if "logarithm" in refs:

            @pl.when(self.plane == 0)
            def _() -> None:
                plgpu.copy_smem_to_gmem(logarithm.at[pl.ds(0, num_rows)], refs["logarithm"].at[*place, rows])

        plgpu.wait_smem_to_gmem(0)
