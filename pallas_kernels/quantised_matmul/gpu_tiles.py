"""The GPU kernel (Hopper, through Mosaic GPU): tiles of a matrix times tiles of rows.

The matrix is the factor that the matrix units take from registers, and rows are the other: so what is widened
is the own affair of the warpgroup that multiplies it, and one row costs an eighth of 64. A thread block has
one or two warpgroups that multiply, each its own outputs by the same rows, and one that fetches: the copy
engine fills a ring of buffers from the stack as it lies there. What a thread block reduces is a tile over all
inputs, or over a part of them where tiles are few.

Axes: P planes of x (of rows split into two of int8 their upper and their lower halves, else one), T rows,
C parts of the inputs, W warpgroups that multiply, m outputs of one, n rows of a tile, k bytes of an output
that are fetched at a time, H halves of a byte that are numbers (two of four bits).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import COMPILER_PARAMS, load_as, matrix_tile
from pallas_kernels.quantised_matmul.nibbles import PAIR_DISTANCE
from pallas_kernels.quantised_matmul.reference import MIDDLE_OF_NIBBLE, index_in

Ref = Any
"""A reference to memory inside a kernel."""

WARPGROUP_ROWS = 64
"""Of a product that the four warps of a warpgroup compute together."""
REGISTERS = 232, 48
"""Of a thread that multiplies and of one that fetches, where two warpgroups multiply."""
MATRIX = plgpu.Layout.WGMMA
WIDENED = plgpu.Layout.WGMMA_UPCAST_2X
"""In which numbers of eight bits are read without conflicts between the banks of shared memory."""
PER_OUTPUT, PER_ROW, PER_WIDENED_OUTPUT = MATRIX.reduce(1), MATRIX.reduce(0), WIDENED.reduce(1)


@dataclass(frozen=True)
class Sizes:
    """What is tuned."""

    rows: int
    """n: a multiple of 8, at most 256, and of 16 where there is one part."""
    num_warpgroups: int
    """W: 1 or 2."""
    outputs: int
    """m: a multiple of 64."""
    num_bytes: int
    """k: 32, 64 or 128."""
    num_buffers: int
    num_parts: int
    """C."""


@dataclass(frozen=True)
class Numbers:
    """What the operands mean."""

    halves: int
    """H."""
    group: int
    """Inputs that share a scale, a multiple of k; 0 for a scale a channel."""
    has_zeros: bool
    widened: bool
    """Whether the matrix is multiplied as bfloat16; otherwise as it is stored, with rows of the same type."""
    integer: bool
    """Whether that type is int8."""
    out_type: Any
    """Of the result, where there is one part."""

    @property
    def sum_type(self) -> Any:
        """Of sums of products."""
        return jnp.int32 if self.integer else jnp.float32


# Compiled apart, so that a model's layers share one lowering.
@functools.partial(jax.jit, static_argnames=("numbers", "sizes", "interpret"))
def multiply_tiles(
    layer_1: jax.Array,
    x_PTI: jax.Array,
    row_scale_T: jax.Array | None,
    values_LOB: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    numbers: Numbers,
    sizes: Sizes,
    interpret: Any = None,
) -> jax.Array:
    """`[T, O]` in the wanted type, or where there are several parts their unscaled sums `[C, P, T, O]`.

    T is a multiple of `sizes.rows`, O one of W * m.
    """
    num_planes, num_rows, _ = x_PTI.shape
    num_outputs = values_LOB.shape[1]
    whole = sizes.num_parts == 1
    operands = {"layer": layer_1, "x": x_PTI, "values": values_LOB}
    if numbers.group or whole:
        operands["scales"] = scales
    if zeros is not None:
        operands["zeros"] = zeros
    if whole and row_scale_T is not None:
        operands["row_scales"] = row_scale_T
    scratch = _scratch(operands, num_planes, numbers, sizes, through_memory=interpret is not None)
    shape = (num_rows, num_outputs) if whole else (sizes.num_parts, num_planes, num_rows, num_outputs)

    def quantised_matmul(*refs: Ref) -> None:
        named = dict(zip([*operands, "out", *scratch], refs, strict=True))
        _Program(named, num_planes, numbers, sizes).run()

    return plgpu.kernel(
        quantised_matmul,
        out_type=jax.ShapeDtypeStruct(shape, numbers.out_type if whole else numbers.sum_type),
        # Neighbours share a tile of the matrix, which is the larger part of what they fetch.
        grid=(sizes.num_parts, num_outputs // (sizes.num_warpgroups * sizes.outputs), num_rows // sizes.rows),
        grid_names=("part", "outputs", "rows"),
        num_threads=sizes.num_warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands.values())


def _scratch(
    operands: dict[str, jax.Array],
    num_planes: int,
    numbers: Numbers,
    sizes: Sizes,
    *,
    through_memory: bool,
) -> dict[str, Any]:
    """Shared memory and barriers by name."""
    x, values = operands["x"], operands["values"]
    ring, own = (sizes.num_buffers,), (sizes.num_warpgroups, sizes.outputs)
    pieces = num_planes * numbers.halves
    whole = sizes.num_parts == 1
    out_type = numbers.out_type if whole else numbers.sum_type
    scratch = {
        "x_tiles": matrix_tile((*ring, pieces, sizes.rows, sizes.num_bytes), x.dtype),
        "tiles": matrix_tile((*ring, *own, sizes.num_bytes), values.dtype),
        "staged": matrix_tile((sizes.num_warpgroups, sizes.rows, WARPGROUP_ROWS), out_type),
    }
    arrivals = pieces + sizes.num_warpgroups
    if numbers.group:
        for name in ("scales", "zeros"):
            if name in operands:
                shape = (*ring, numbers.halves, *own)
                scratch[f"{name}_tiles"] = plgpu.SMEM(shape, operands[name].dtype)
                arrivals += numbers.halves * sizes.num_warpgroups
    elif whole:
        scratch["channel_scales"] = plgpu.SMEM(own, operands["scales"].dtype)
    if "row_scales" in operands:
        scratch["row_scale_tile"] = plgpu.SMEM((sizes.rows,), jnp.float32)
    scratch["filled"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=sizes.num_buffers)
    scratch["released"] = plgpu.Barrier(num_arrivals=sizes.num_warpgroups, num_barriers=sizes.num_buffers)
    late = sizes.num_warpgroups * ("channel_scales" in scratch) + ("row_scale_tile" in scratch)
    if late:
        scratch["scaled"] = plgpu.Barrier(num_arrivals=late)
    if numbers.widened and through_memory:
        # JAX's interpreter takes both factors from shared memory only.
        shape = sizes.num_warpgroups, WARPGROUP_ROWS, sizes.num_bytes
        scratch["wide"] = matrix_tile(shape, jnp.bfloat16)
    return scratch


@dataclass(frozen=True)
class _Program:
    """What a thread block does."""

    refs: dict[str, Ref]
    num_planes: int
    numbers: Numbers
    sizes: Sizes

    def run(self) -> None:
        """Fetch in one warpgroup, multiply in the others."""
        number, num_warpgroups = lax.axis_index("warpgroup"), self.sizes.num_warpgroups

        @pl.when(number == num_warpgroups)
        def _() -> None:
            if num_warpgroups > 1:
                plgpu.set_max_registers(REGISTERS[1], action="decrease")
            self._fetch_all()

        @pl.when(number < num_warpgroups)
        def _() -> None:
            if num_warpgroups > 1:
                plgpu.set_max_registers(REGISTERS[0], action="increase")
            _Multiplication(self, number).run()

    @property
    def first_output(self) -> jax.Array:
        return lax.axis_index("outputs") * (self.sizes.num_warpgroups * self.sizes.outputs)

    @property
    def first_row(self) -> jax.Array:
        return lax.axis_index("rows") * self.sizes.rows

    def steps(self) -> tuple[jax.Array, jax.Array]:
        """The first of this part's steps over the inputs, and the one after its last."""
        num_steps = self.refs["values"].shape[2] // self.sizes.num_bytes
        per_part = -(-num_steps // self.sizes.num_parts)
        first = lax.axis_index("part") * per_part
        return first, jnp.minimum(first + per_part, num_steps)

    def slot(self, step: jax.Array) -> jax.Array:
        """Which buffer holds what a step multiplies."""
        return lax.rem(step - self.steps()[0], jnp.int32(self.sizes.num_buffers))

    def _fetch_all(self) -> None:
        """Each step's as soon as a buffer is free."""
        first, end = self.steps()
        self._fetch_scales()

        def fetch(step: jax.Array, carry: None) -> None:
            slot = self.slot(step)

            @pl.when(step - first >= self.sizes.num_buffers)
            def _() -> None:
                plgpu.barrier_wait(self.refs["released"].at[slot])

            self._fetch(step, slot)

        lax.fori_loop(first, end, fetch, None)

    def _outputs(self, warpgroup: int) -> Any:
        return pl.ds(self.first_output + warpgroup * self.sizes.outputs, self.sizes.outputs)

    def _layer(self, name: str) -> Any:
        return index_in(self.refs[name], self.refs["layer"][0])

    def _fetch_scales(self) -> None:
        """Those of channels and rows, which are not needed before the end."""
        refs = self.refs
        if "channel_scales" in refs:
            for warpgroup in range(self.sizes.num_warpgroups):
                source = refs["scales"].at[self._layer("scales"), self._outputs(warpgroup)]
                plgpu.copy_gmem_to_smem(source, refs["channel_scales"].at[warpgroup], refs["scaled"])
        if "row_scale_tile" in refs:
            source = refs["row_scales"].at[pl.ds(self.first_row, self.sizes.rows)]
            plgpu.copy_gmem_to_smem(source, refs["row_scale_tile"], refs["scaled"])

    def _inputs(self, step: jax.Array, half: int) -> jax.Array:
        """The first input of a step's bytes, or of their lower or upper halves."""
        first = step * self.sizes.num_bytes
        if self.numbers.halves == 1:
            return first
        # A byte's halves are so far apart, in blocks of twice as many.
        per_block = PAIR_DISTANCE // self.sizes.num_bytes
        block, within = lax.div(step, jnp.int32(per_block)), lax.rem(step, jnp.int32(per_block))
        pieces = block * 2 * per_block + half * per_block + within
        return pieces * self.sizes.num_bytes

    def _fetch(self, step: jax.Array, slot: jax.Array) -> None:
        """Begin to copy what a step multiplies."""
        refs, halves, width = self.refs, self.numbers.halves, self.sizes.num_bytes
        barrier, layer = refs["filled"].at[slot], self._layer("values")
        for warpgroup in range(self.sizes.num_warpgroups):
            plgpu.copy_gmem_to_smem(
                refs["values"].at[layer, self._outputs(warpgroup), pl.ds(step * width, width)],
                refs["tiles"].at[slot, warpgroup],
                barrier,
            )
        for half in range(halves):
            first = self._inputs(step, half)
            for plane in range(self.num_planes):
                plgpu.copy_gmem_to_smem(
                    refs["x"].at[plane, pl.ds(self.first_row, self.sizes.rows), pl.ds(first, width)],
                    refs["x_tiles"].at[slot, plane * halves + half],
                    barrier,
                )
            if not self.numbers.group:
                continue
            group = lax.div(first, jnp.int32(self.numbers.group))
            for name in ("scales", "zeros"):
                for warpgroup in range(self.sizes.num_warpgroups if f"{name}_tiles" in refs else 0):
                    plgpu.copy_gmem_to_smem(
                        refs[name].at[self._layer(name), group, self._outputs(warpgroup)],
                        refs[f"{name}_tiles"].at[slot, half, warpgroup],
                        barrier,
                    )


@dataclass(frozen=True)
class _Multiplication:
    """What one warpgroup does of it."""

    program: _Program
    number: jax.Array

    @property
    def refs(self) -> dict[str, Ref]:
        return self.program.refs

    @property
    def _num_tiles(self) -> int:
        """Of 64 outputs."""
        return self.program.sizes.outputs // WARPGROUP_ROWS

    def run(self) -> None:
        """Multiply, then write."""
        program = self.program
        first, end = program.steps()
        shape = WARPGROUP_ROWS, program.sizes.rows
        kinds = [plgpu.WGMMAAccumulatorRef(shape, program.numbers.sum_type)] * (
            self._num_tiles * program.num_planes
        )
        if not program.numbers.widened and not program.numbers.integer:
            self._write(self._summed_apart(first, end, kinds))
            return

        def multiply(*accumulators: Ref) -> tuple[jax.Array, ...]:
            def step(number: jax.Array, carry: None) -> None:
                self._step(number, accumulators)

            lax.fori_loop(first, end, step, None)
            return tuple(accumulator[...] for accumulator in accumulators)

        self._write(pl.run_scoped(multiply, *kinds))

    def _summed_apart(self, first: jax.Array, end: jax.Array, kinds: list[Any]) -> tuple[jax.Array, ...]:
        """The matrix units add products of fp8 up in about 14 bits (DeepSeek-V3, arXiv 2412.19437, 3.3.2), so
        what they have of one step is added to sums in float32."""

        def step(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            def multiply(*accumulators: Ref) -> tuple[jax.Array, ...]:
                self._step(number, accumulators)
                return tuple(accumulator[...] for accumulator in accumulators)

            return tuple(a + b for a, b in zip(sums, pl.run_scoped(multiply, *kinds), strict=True))

        shape = WARPGROUP_ROWS, self.program.sizes.rows
        zero = plgpu.layout_cast(jnp.full(shape, 0.0, jnp.float32), MATRIX)
        return lax.fori_loop(first, end, step, (zero,) * len(kinds))

    def _step(self, step: jax.Array, accumulators: tuple[Ref, ...]) -> None:
        """Add the products of one step's inputs, by tile and then by plane."""
        refs, program = self.refs, self.program
        halves, num_planes = program.numbers.halves, program.num_planes
        slot = program.slot(step)
        plgpu.barrier_wait(refs["filled"].at[slot])
        for tile in range(self._num_tiles):
            rows = pl.ds(tile * WARPGROUP_ROWS, WARPGROUP_ROWS)
            stored = refs["tiles"].at[slot, self.number, rows]
            for half in range(halves):
                matrix = self._widen(stored, slot, half, rows) if program.numbers.widened else stored
                for plane in range(num_planes):
                    x_tile = refs["x_tiles"].at[slot, plane * halves + half]
                    plgpu.wgmma(accumulators[tile * num_planes + plane], matrix, x_tile.transpose((1, 0)))
                if program.numbers.widened:
                    # Registers are not written to while the matrix units read them.
                    plgpu.wgmma_wait(0)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(refs["released"].at[slot])

    def _widen(self, stored: Ref, slot: jax.Array, half: int, rows: Any) -> Any:
        """A tile in bfloat16, in registers, scaled where groups of inputs have scales."""
        numbers = self.program.numbers
        tile = load_as(stored, WIDENED)
        if numbers.halves == 2:
            bits = tile.astype(jnp.int32)
            tile = (lax.shift_right_logical(bits, jnp.full_like(bits, 4)) if half else bits) & 15
        if stored.dtype == jnp.float8_e4m3fn or numbers.group:
            # Hopper does not convert from float8 to bfloat16 directly.
            tile = tile.astype(jnp.float32)
        if numbers.has_zeros:
            tile = tile - self._per_output("zeros_tiles", slot, half, rows, tile.shape)
        elif numbers.halves == 2:
            tile = tile - float(MIDDLE_OF_NIBBLE)
        if numbers.group:
            tile = tile * self._per_output("scales_tiles", slot, half, rows, tile.shape)
        tile = plgpu.layout_cast(tile.astype(jnp.bfloat16), MATRIX)
        if "wide" not in self.refs:
            return tile
        wide = self.refs["wide"].at[self.number]
        wide[...] = tile
        plgpu.commit_smem()
        return wide

    def _per_output(
        self, name: str, slot: jax.Array, half: int, rows: Any, shape: tuple[int, ...]
    ) -> jax.Array:
        numbers = load_as(self.refs[name].at[slot, half, self.number, rows], PER_WIDENED_OUTPUT)
        if jnp.issubdtype(numbers.dtype, jnp.integer):
            numbers = numbers.astype(jnp.int32)
        return lax.broadcast_in_dim(numbers.astype(jnp.float32), shape, [0])

    def _write(self, sums: tuple[jax.Array, ...]) -> None:
        """Scaled, or the sums of a part as they are."""
        refs, program = self.refs, self.program
        sizes, num_planes = program.sizes, program.num_planes
        staged = refs["staged"].at[self.number]
        if "scaled" in refs:
            plgpu.barrier_wait(refs["scaled"])
        for tile in range(self._num_tiles):
            own = sums[tile * num_planes : (tile + 1) * num_planes]
            first = program.first_output + self.number * sizes.outputs + tile * WARPGROUP_ROWS
            place = pl.ds(program.first_row, sizes.rows), pl.ds(first, WARPGROUP_ROWS)
            if sizes.num_parts == 1:
                self._copy_out(staged, self._scaled(own, tile), refs["out"].at[*place])
                continue
            for plane, one in enumerate(own):
                self._copy_out(staged, one, refs["out"].at[lax.axis_index("part"), plane, *place])

    def _scaled(self, planes: tuple[jax.Array, ...], tile: int) -> jax.Array:
        refs, shape = self.refs, planes[0].shape
        sums = planes[0] if len(planes) == 1 else planes[0] * 128 + planes[1]
        sums = sums.astype(jnp.float32)
        if "channel_scales" in refs:
            rows = pl.ds(tile * WARPGROUP_ROWS, WARPGROUP_ROWS)
            scale = load_as(refs["channel_scales"].at[self.number, rows], PER_OUTPUT)
            factor = lax.broadcast_in_dim(scale.astype(jnp.float32), shape, [0])
            if "row_scale_tile" in refs:
                row_scale = load_as(refs["row_scale_tile"], PER_ROW)
                factor = factor * lax.broadcast_in_dim(row_scale, shape, [1])
            sums = sums * factor
        return sums.astype(self.program.numbers.out_type)

    def _copy_out(self, staged: Ref, numbers: jax.Array, place: Ref) -> None:
        staged.transpose((1, 0))[...] = plgpu.layout_cast(numbers, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, place)
        plgpu.wait_smem_to_gmem(0)
