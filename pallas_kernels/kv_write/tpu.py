"""KV write on TPU: the memory tiles that new rows lie in are fetched, changed and put back, many at a time.

A row of a page is a part of a memory tile, which is the least that can be written. Consecutive rows in the
same tile are one *run*, so that no tile is fetched while it is on its way back: the tokens of one sequence
follow each other, and no two sequences write to a page but to the sink, which nothing reads.

Axes: T rows of the step, K kv heads, E planes of a head, R rows of a page in one tile, B blocks of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import interpreter
from pallas_kernels.page_layout import FORMAT_MAX, LANES, SMALLEST_PEAK, PageLayout

SUBLANES = 8
MAX_BLOCK_ROWS = 256
"""New rows in vector memory at a time; between blocks all writes are waited for."""
BLOCK_BYTES = 4 << 20
"""Of new rows in float32, at most where one tile's rows allow it."""
RING_BYTES, MIN_BUFFERS, MAX_BUFFERS = 4 << 20, 4, 16
"""Of tiles on their way. With fewer than four, a run's scales would be overwritten before the next one of the
same page has taken them over."""
MAX_ROWS = 32 << 10
"""Whose places take half of the scalar memory."""

Ref = Any
"""A reference to memory inside a kernel."""
Scalar = jax.Array | int


def obstacle(layout: PageLayout, num_rows: int, **_: object) -> str | None:
    """Why the kernel cannot write, or None."""
    if layout.storage != layout.kv_format:
        return f"pages of {layout.kv_format} are stored as {layout.storage}"
    if layout.page_size % tile_rows(layout):
        return f"pages of {layout.page_size} tokens are no multiple of {tile_rows(layout)}"
    if layout.quantised and layout.scale_lanes != LANES:
        return f"scales of pages of {layout.page_size} tokens do not fill rows of {LANES} lanes"
    if num_rows > MAX_ROWS:
        return f"{num_rows} rows exceed {MAX_ROWS}"
    return None


def tile_rows(layout: PageLayout) -> int:
    """R."""
    return SUBLANES * 4 // jnp.dtype(layout.storage).itemsize


def write_tpu(
    pool: jax.Array,
    scales: jax.Array | None,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    layout: PageLayout,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """See `kv_write`."""
    num_rows, step = page_T.shape[0], tile_rows(layout)
    num_planes = layout.num_kv_heads * layout.planes
    fitting = BLOCK_BYTES // (num_planes * LANES * 4) // step * step
    block = min(MAX_BLOCK_ROWS, max(step, fitting), -(-num_rows // SUBLANES) * SUBLANES)
    num_blocks = -(-num_rows // block)
    # Rows beyond the last begin no run.
    padding = num_blocks * block - num_rows
    page_X, offset_X = jnp.pad(page_T, (0, padding)), jnp.pad(offset_T, (0, padding))
    next_X, num_runs_B = _runs(page_X, offset_X // step, num_rows, block)
    planes_XE = layout.join(k_TKh.astype(jnp.float32), v_TKh.astype(jnp.float32))
    planes_XE = jnp.pad(planes_XE.reshape(num_rows, num_planes, LANES), ((0, padding), (0, 0), (0, 0)))
    # A tile's rows are read from as many before the run's first as it has in the tile.
    new_BEx = jnp.swapaxes(planes_XE.reshape(num_blocks, block, num_planes, LANES), 1, 2)
    new_BEx = jnp.pad(new_BEx, ((0, 0), (0, 0), (step, step), (0, 0)))
    by_plane = pool.reshape(pool.shape[0], num_planes, layout.page_size, LANES)
    pools = [by_plane, *([] if scales is None else [scales])]
    tile_bytes = num_planes * step * LANES * jnp.dtype(layout.storage).itemsize
    num_buffers = max(MIN_BUFFERS, min(MAX_BUFFERS, RING_BYTES // tile_bytes))
    buffers = [pltpu.VMEM((num_buffers, num_planes, step, LANES), pool.dtype)]
    if scales is not None:
        buffers.append(pltpu.VMEM((num_buffers, layout.scale_rows, LANES), jnp.float32))
    # Not just anywhere: XLA would copy the scales of a small pool to vector memory, and back.
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    written = pl.pallas_call(
        functools.partial(_kernel, layout=layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_blocks,),
            in_specs=[
                pl.BlockSpec((1, *new_BEx.shape[1:]), lambda b, *_: (b, 0, 0, 0)),
                *[in_hbm] * len(pools),
            ],
            out_specs=[in_hbm] * len(pools),
            scratch_shapes=[
                *buffers,
                *[pltpu.SemaphoreType.DMA((num_buffers,))] * 2,
                *([pltpu.SMEM((num_buffers,), jnp.int32)] if scales is not None else []),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pools],
        # The first five are scalars and new rows.
        input_output_aliases={5 + number: number for number in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True, vmem_limit_bytes=64 << 20
        ),
        interpret=interpreter(interpret),
        name="kv_write",
    )(page_X, offset_X, next_X, num_runs_B, new_BEx, *pools)
    return written[0].reshape(pool.shape), written[1] if scales is not None else None


def _runs(page_X: jax.Array, tile_X: jax.Array, num_rows: int, block: int) -> tuple[jax.Array, jax.Array]:
    """For each row the first one of the next run, within its block, and how many runs each block has."""
    row_X = jnp.arange(page_X.shape[0], dtype=jnp.int32)
    changed = jnp.concatenate(
        [jnp.ones((1,), bool), (page_X[1:] != page_X[:-1]) | (tile_X[1:] != tile_X[:-1])]
    )
    begins_X = (changed | (row_X % block == 0)) & (row_X < num_rows)
    begins_BX = begins_X.reshape(-1, block)
    local_BX = jnp.broadcast_to(jnp.arange(block, dtype=jnp.int32), begins_BX.shape)
    from_BX = lax.cummin(jnp.where(begins_BX, local_BX, block), axis=1, reverse=True)
    next_BX = jnp.concatenate([from_BX[:, 1:], jnp.full_like(from_BX[:, :1], block)], axis=1)
    # Of the last block's last run the rows beyond the last are no part.
    next_BX = jnp.minimum(next_BX, jnp.maximum(num_rows - jnp.arange(len(begins_BX))[:, None] * block, 0))
    return next_BX.reshape(-1).astype(jnp.int32), jnp.sum(begins_BX, axis=1, dtype=jnp.int32)


def _kernel(
    page_ref: Ref,  # SMEM [X]
    offset_ref: Ref,  # SMEM [X]
    next_ref: Ref,  # SMEM [X], counted in the block
    num_runs_ref: Ref,  # SMEM [B]
    new_ref: Ref,  # VMEM [1, K * E, R + X / B + R, 128]
    *refs: Ref,  # pool [N, K * E, page_size, 128] and scales in HBM, twice; then those of `_Ring`
    layout: PageLayout,
) -> None:
    num_pools, step = 2 if layout.quantised else 1, tile_rows(layout)
    num_rows = new_ref.shape[2] - 2 * step
    first_row = pl.program_id(0) * num_rows
    num_runs = num_runs_ref[pl.program_id(0)]
    ring = _Ring.of(refs[num_pools : 2 * num_pools], refs[2 * num_pools :])
    num_ahead = ring.num_buffers // 2

    def fetch(number: Scalar, row: Scalar) -> Scalar:
        """Begin to fetch a run's tile if there is one of that number; returns the next run's first row."""
        at = first_row + jnp.minimum(row, num_rows - 1)

        @pl.when(number < num_runs)
        def _() -> None:
            slot = ring.slot(number)

            @pl.when(number >= ring.num_buffers)
            def _() -> None:
                ring.wait_written(slot)

            ring.start_read(slot, page_ref[at], offset_ref[at], continued(row))

        return next_ref[at]

    def continued(row: Scalar) -> Scalar:
        """Whether a run's page is that of the one before, which then hands the scales on."""
        at = first_row + row
        return (row > 0) & (page_ref[at] == page_ref[jnp.maximum(at - 1, 0)])

    def write(number: jax.Array, cursors: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        row, ahead = cursors
        at, slot = first_row + row, ring.slot(number)
        ahead = fetch(number + num_ahead, ahead)
        page, offset, end = page_ref[at], offset_ref[at], next_ref[at]
        ring.finish_read(number, continued(row))
        _change(new_ref, ring.buffers(slot), row, end - row, offset, layout)
        is_last = (number == num_runs - 1) | (page_ref[first_row + jnp.minimum(end, num_rows - 1)] != page)
        ring.start_write(slot, page, offset, is_last)
        return end, ahead

    ahead = lax.fori_loop(0, num_ahead, fetch, jnp.int32(0))
    lax.fori_loop(0, num_runs, write, (jnp.int32(0), ahead))
    lax.fori_loop(
        jnp.maximum(num_runs - ring.num_buffers, 0),
        num_runs,
        lambda number, _: ring.wait_written(ring.slot(number)),
        None,
    )


@dataclass(frozen=True)
class _Ring:
    """Tiles on their way from memory and back. A page's scales, where there are any, are fetched for the
    first of its runs, handed from one to the next, and put back after the last."""

    pool_ref: Ref
    """[N, K * E, page_size, 128] in HBM."""
    scales_ref: Ref | None
    """[N, scale_rows, 128] in HBM."""
    tiles_ref: Ref
    """[buffers, K * E, R, 128]."""
    page_scales_ref: Ref | None
    """[buffers, scale_rows, 128]."""
    reads_ref: Ref
    """Semaphores [buffers]; they count what arrived in a buffer."""
    writes_ref: Ref
    scales_written_ref: Ref | None
    """[buffers]: whether the buffer's scales were put back too."""

    @classmethod
    def of(cls, pools: Sequence[Ref], scratch: Sequence[Ref]) -> _Ring:
        if len(pools) == 1:
            tiles_ref, reads_ref, writes_ref = scratch
            return cls(pools[0], None, tiles_ref, None, reads_ref, writes_ref, None)
        tiles_ref, page_scales_ref, reads_ref, writes_ref, scales_written_ref = scratch
        pool_ref, scales_ref = pools
        return cls(
            pool_ref, scales_ref, tiles_ref, page_scales_ref, reads_ref, writes_ref, scales_written_ref
        )

    @property
    def num_buffers(self) -> int:
        return self.tiles_ref.shape[0]

    def slot(self, number: Scalar) -> Scalar:
        """The buffer of a run."""
        return lax.rem(number, jnp.int32(self.num_buffers))

    def buffers(self, slot: Scalar) -> list[Ref]:
        """`[K * E, R, 128]`, and `[scale_rows, 128]` where there are scales."""
        refs = [self.tiles_ref, *([] if self.page_scales_ref is None else [self.page_scales_ref])]
        return [ref.at[slot] for ref in refs]

    def start_read(self, slot: Scalar, page: Scalar, offset: Scalar, continued: Scalar) -> None:
        semaphore = self.reads_ref.at[slot]
        pltpu.make_async_copy(self._tile(page, offset), self.tiles_ref.at[slot], semaphore).start()
        scales_ref, page_scales_ref = self.scales_ref, self.page_scales_ref
        if scales_ref is None or page_scales_ref is None:
            return

        @pl.when(jnp.logical_not(continued))
        def _() -> None:
            pltpu.make_async_copy(scales_ref.at[page], page_scales_ref.at[slot], semaphore).start()

    def finish_read(self, number: Scalar, continued: Scalar) -> None:
        """Until a run's tile is here, and its page's scales, be they handed over."""
        slot = self.slot(number)
        semaphore, page_scales_ref = self.reads_ref.at[slot], self.page_scales_ref
        _wait(self.tiles_ref.at[slot], semaphore)
        if page_scales_ref is None:
            return

        @pl.when(jnp.logical_not(continued))
        def _() -> None:
            _wait(page_scales_ref.at[slot], semaphore)

        @pl.when(continued)
        def _() -> None:
            page_scales_ref[slot] = page_scales_ref[self.slot(number + self.num_buffers - 1)]

    def start_write(self, slot: Scalar, page: Scalar, offset: Scalar, with_scales: Scalar) -> None:
        semaphore = self.writes_ref.at[slot]
        pltpu.make_async_copy(self.tiles_ref.at[slot], self._tile(page, offset), semaphore).start()
        scales_ref, page_scales_ref = self.scales_ref, self.page_scales_ref
        if scales_ref is None or page_scales_ref is None or self.scales_written_ref is None:
            return
        self.scales_written_ref[slot] = jnp.where(with_scales, 1, 0)

        @pl.when(with_scales)
        def _() -> None:
            pltpu.make_async_copy(page_scales_ref.at[slot], scales_ref.at[page], semaphore).start()

    def wait_written(self, slot: Scalar) -> None:
        """Until what was last put back from a buffer has arrived."""
        semaphore, page_scales_ref = self.writes_ref.at[slot], self.page_scales_ref
        _wait(self.tiles_ref.at[slot], semaphore)
        if page_scales_ref is None or self.scales_written_ref is None:
            return

        @pl.when(self.scales_written_ref[slot] > 0)
        def _() -> None:
            _wait(page_scales_ref.at[slot], semaphore)

    def _tile(self, page: Scalar, offset: Scalar) -> Ref:
        """Of every plane, the tile of a page that a token of it lies in."""
        step = self.tiles_ref.shape[2]
        first = pl.multiple_of(lax.div(offset, jnp.int32(step)) * step, step)
        return self.pool_ref.at[page, :, pl.ds(first, step), :]


def _wait(buffer: Ref, semaphore: Ref) -> None:
    # A wait counts the bytes of its destination; what they are does not matter.
    pltpu.make_async_copy(buffer, buffer, semaphore).wait()


def _change(
    new_ref: Ref, buffers: Sequence[Ref], row: Scalar, count: Scalar, offset: Scalar, layout: PageLayout
) -> None:
    """Put a run's rows into its tile of every plane, and their scales on the page's.

    Args:
        buffers: `[K * E, R, 128]`, and `[scale_rows, 128]` where there are scales.
        row: the run's first, of the block's.
        count: rows of it.
        offset: of the first on its page.
    """
    step, planes = tile_rows(layout), layout.planes
    first = lax.rem(offset, jnp.int32(step))
    place_R1 = lax.broadcasted_iota(jnp.int32, (step, 1), 0)
    own_R1 = (place_R1 >= first) & (place_R1 < first + count)
    rows = pl.ds(row - first + step, step)
    for head in range(layout.num_kv_heads):
        parts = [new_ref[0, head * planes + plane, rows, :] for plane in range(planes)]
        if layout.quantised:
            parts, scale_R1s = _quantised(parts, layout)
            for part, scale_R1 in enumerate(scale_R1s):
                _put_scales(buffers[1], 2 * head + part, scale_R1, own_R1, offset - first, layout)
        for plane, values in enumerate(parts):
            _put(buffers[0].at[head * planes + plane], values, own_R1)


def _put(tile_ref: Ref, values: jax.Array, own_R1: jax.Array) -> None:
    """Rows `[R, 128]` into a tile, in numbers of 32 bits, which can be chosen row by row."""
    wide = jnp.int32 if tile_ref.dtype == jnp.int8 else jnp.float32
    chosen = jnp.where(own_R1, values.astype(wide), tile_ref[...].astype(wide))
    tile_ref[...] = chosen.astype(tile_ref.dtype)


def _quantised(parts: list[jax.Array], layout: PageLayout) -> tuple[list[jax.Array], list[jax.Array]]:
    """As `PageLayout.quantise`: a head's planes, and the scales `[R, 1]` of its keys and of its values."""
    largest = FORMAT_MAX[layout.kv_format]
    # Of a shared plane, keys are the lower lanes.
    lower = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) < LANES // 2
    half = len(parts) // 2
    if half:
        sides = [parts[:half], parts[half:]]
    else:
        sides = [[jnp.where(lower, parts[0], 0.0)], [jnp.where(lower, 0.0, parts[0])]]
    scale_R1s: list[jax.Array] = []
    for side in sides:
        peak = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=1, keepdims=True) for x in side])
        scale_R1s.append(jnp.maximum(peak, SMALLEST_PEAK) / largest)
    keys, values = scale_R1s
    by_plane = [keys] * half + [values] * half if half else [jnp.where(lower, keys, values)]
    scaled = [x / scale for x, scale in zip(parts, by_plane, strict=True)]
    if layout.kv_format == "int8":
        return [jnp.round(x) for x in scaled], scale_R1s
    return [jnp.clip(x, -largest, largest) for x in scaled], scale_R1s


def _put_scales(
    scales_ref: Ref, part: int, scale_R1: jax.Array, own_R1: jax.Array, tile: Scalar, layout: PageLayout
) -> None:
    """A tile's column of scales into the row of the page's that holds them, token by lane.

    `tile`: the first token of the tile on its page.
    """
    place = part * layout.page_size + tile
    row, first_lane = lax.div(place, jnp.int32(LANES)), lax.rem(place, jnp.int32(LANES))
    lane_RL = lax.broadcasted_iota(jnp.int32, (scale_R1.shape[0], LANES), 1)
    place_RL = lax.broadcasted_iota(jnp.int32, (scale_R1.shape[0], LANES), 0)
    meets_RL = (lane_RL - first_lane == place_RL) & own_R1
    turned_1L = jnp.sum(jnp.where(meets_RL, scale_R1, 0.0), axis=0, keepdims=True)
    is_new_1L = jnp.max(jnp.where(meets_RL, 1.0, 0.0), axis=0, keepdims=True) > 0
    at = pl.ds(row, 1)
    scales_ref[at, :] = jnp.where(is_new_1L, turned_1L, scales_ref[at, :])
