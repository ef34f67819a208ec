"""Many rows: a matrix's tile is widened once, and then multiplied with one tile of rows after the other.

Axes: P planes of x (of rows split into two of int8 their upper and their lower halves, else one), t rows of a
tile, o outputs of a tile.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantised_matmul.tpu_tiles import (
    LANES,
    Matrix,
    Ref,
    Scalar,
    Sizes,
    dot,
    middle,
    scaled_integers,
    split_refs,
    sum_type,
)

WIDEN_LANES, MULTIPLY_LANES = 256, 1024
"""Inputs that are widened, and that are multiplied, at a time."""


def multiply_many(
    layer_1: jax.Array,
    x_PTI: jax.Array,
    row_scale_T1: jax.Array | None,
    matrix: Matrix,
    *,
    out_type: Any,
    sizes: Sizes,
    interpret: Any,
) -> jax.Array:
    """`[T, O]`."""
    num_planes, num_rows, num_inputs = x_PTI.shape
    dtype = x_PTI.dtype
    rows = [x_PTI]
    row_specs = [pl.BlockSpec((num_planes, sizes.rows, num_inputs), lambda o, t, _: (0, t, 0))]
    scratch = [pltpu.VMEM((num_planes * sizes.rows, sizes.outputs), sum_type(dtype))]
    if row_scale_T1 is None:
        scratch.append(pltpu.VMEM((sizes.outputs, num_inputs), dtype))
    else:
        rows.append(row_scale_T1)
        row_specs.append(pl.BlockSpec((sizes.rows, 1), lambda o, t, _: (t, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, stored_zeros=matrix.zeros is not None, has_bias=matrix.bias is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(matrix.num_outputs, sizes.outputs), num_rows // sizes.rows),
            in_specs=[*row_specs, *matrix.specs(sizes.outputs)],
            out_specs=pl.BlockSpec((sizes.rows, sizes.outputs), lambda o, t, _: (t, o)),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, matrix.num_outputs), out_type),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=100 << 20,
        ),
        interpret=interpret,
        name="quantised_matmul_many",
    )(layer_1, *rows, *matrix.operands())


def _kernel(
    layer_ref: Ref,  # SMEM [1]
    x_ref: Ref,  # VMEM [P, t, I]
    *refs: Ref,  # scales of rows [t, 1]; the matrix's; out [t, o]; sums [P * t, o]; the widened tile [o, I]
    stored_zeros: bool,
    has_bias: bool,
) -> None:
    dtype, (num_planes, num_rows, num_inputs) = x_ref.dtype, x_ref.shape
    row_scale_ref, matrix, out_ref, (sums_ref, *wide_ref) = split_refs(
        refs, jnp.issubdtype(dtype, jnp.integer), num_inputs, stored_zeros, has_bias
    )
    if wide_ref:

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            _widen(matrix, wide_ref[0])

    def tile(first: Scalar, width: int) -> jax.Array:
        at = pl.ds(first, width)
        return wide_ref[0][:, at] if wide_ref else matrix.values[0, :, at]

    sums_ref[...] = jnp.zeros_like(sums_ref)

    def add(first: Scalar, width: int) -> None:
        x = x_ref[:, :, pl.ds(first, width)].reshape(num_planes * num_rows, width)
        sums_ref[...] += dot(x, tile(first, width))

    _chunks(num_inputs, MULTIPLY_LANES, add)
    sums = sums_ref[...]
    if row_scale_ref is not None:
        out = scaled_integers(sums, num_planes, row_scale_ref[...], matrix.channel_scales(layer_ref[0]))
    elif matrix.num_groups:
        out = sums
    else:
        out = sums * matrix.channel_scales(layer_ref[0])
    out_ref[...] = matrix.with_bias(out, layer_ref[0]).astype(out_ref.dtype)


def _widen(matrix: Matrix, wide_ref: Ref) -> None:
    """The tile's numbers in the type of x: of groups the scaled ones, of channels the stored ones."""
    dtype = wide_ref.dtype
    if not matrix.num_groups:
        _chunks(
            matrix.num_inputs,
            WIDEN_LANES,
            lambda first, width: _store(wide_ref, first, matrix.part(first, width, dtype)),
        )
        return
    scales_oG = matrix.scales[0].astype(jnp.float32).T.astype(matrix.scales.dtype)
    zeros_oG = None if matrix.zeros is None else matrix.group_zeros().T
    width = WIDEN_LANES if matrix.num_inputs % WIDEN_LANES == 0 else LANES

    def widen(first: Scalar, width: int) -> None:
        begin = pl.multiple_of(jnp.asarray(first // 2), LANES) if matrix.packed else first
        part = matrix.part(begin, LANES if matrix.packed else width, jnp.float32)
        zeros = middle(matrix) if zeros_oG is None else _to_inputs(zeros_oG, first, width, matrix.group)
        scaled = (part - zeros) * _to_inputs(scales_oG, first, width, matrix.group)
        _store(wide_ref, first, scaled.astype(dtype))

    _chunks(matrix.num_inputs, width, widen)


def _store(ref: Ref, first: Scalar, part: jax.Array) -> None:
    ref[:, pl.ds(first, part.shape[1])] = part


def _to_inputs(by_group_oG: jax.Array, first: Scalar, width: int, group: int) -> jax.Array:
    """Float32 `[o, width]`: what belongs to the group of each input from `first` on, by the matrix unit."""
    shape = width, by_group_oG.shape[1]
    own = (first + lax.broadcasted_iota(jnp.int32, shape, 0)) // group
    chosen = own == lax.broadcasted_iota(jnp.int32, shape, 1)
    return dot(by_group_oG, jnp.where(chosen, 1.0, 0.0).astype(by_group_oG.dtype))


def _chunks(num_inputs: int, width: int, do: Any) -> None:
    """`do(first, width)` for all inputs, so many at a time, and for the rest."""
    num_chunks, rest = divmod(num_inputs, width)

    def step(number: jax.Array, carry: None) -> None:
        do(pl.multiple_of(number * width, width), width)

    lax.fori_loop(0, num_chunks, step, None)
    if rest:
        do(num_chunks * width, rest)
