"""Few rows: a matrix's tiles stream through, and are widened as they pass.

Scales of groups are multiplied with the sums of their inputs, and not with each weight: where the depth of
the matrix unit holds several groups, each row is multiplied once for each with the others' inputs cleared.
Zeros, and what else was added to the weights, are taken off those sums.

Axes: M rows of x (of int8 the upper halves, then the lower ones), o outputs of a tile, c inputs of a chunk.
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
    NIBBLE_BIAS,
    Matrix,
    Ref,
    Scalar,
    Sizes,
    dot,
    halves,
    interleaved,
    middle,
    scaled_integers,
    split_refs,
    sum_type,
    unrolled_loop,
    whole_unroll,
)

CHUNK_LANES = 256
"""Bytes of each row that are widened and multiplied together: as deep as v6e's matrix unit."""


def multiply_few(
    layer_1: jax.Array,
    x_PTI: jax.Array,
    row_scale_T1: jax.Array | None,
    matrix: Matrix,
    *,
    out_type: Any,
    sizes: Sizes,
    interpret: Any,
) -> jax.Array:
    """`[T, O]`, T being `sizes.rows`."""
    dtype, num_planes, groups = x_PTI.dtype, x_PTI.shape[0], matrix.num_groups
    x_MI = x_PTI.reshape(-1, matrix.num_inputs)
    if groups:
        # Whole registers of 32 bits, for rows that are cleared in part and put one below the other.
        x_MI = x_MI.astype(jnp.float32)

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0, 0))

    rows = [x_MI, *([] if row_scale_T1 is None else [row_scale_T1])]
    num_halves = 2 if keeps_halves(matrix, dtype) else 1
    by_group = [pltpu.VMEM((num_halves, groups, sizes.outputs // num_halves), jnp.float32)]
    return pl.pallas_call(
        functools.partial(
            _kernel,
            num_inputs=matrix.num_inputs,
            num_planes=num_planes,
            dtype=dtype,
            sizes=sizes,
            has_zeros=matrix.zeros is not None,
            num_outputs=matrix.num_outputs,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(matrix.num_outputs, sizes.outputs),),
            in_specs=[*map(whole, rows), *matrix.specs(sizes.outputs)],
            out_specs=pl.BlockSpec((sizes.rows, sizes.outputs), lambda o, _: (0, o)),
            scratch_shapes=by_group * (0 if not groups else 1 if matrix.zeros is None else 2),
        ),
        out_shape=jax.ShapeDtypeStruct((sizes.rows, matrix.num_outputs), out_type),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True, vmem_limit_bytes=64 << 20
        ),
        interpret=interpret,
        name="quantised_matmul_few",
    )(layer_1, *rows, *matrix.operands())


def group_depth(matrix: Matrix, sizes: Sizes) -> int:
    """Inputs that are multiplied together where groups have scales."""
    return LANES if matrix.num_inputs % sizes.depth else sizes.depth


def bytes_an_iteration(matrix: Matrix, sizes: Sizes) -> int:
    """Of each row of the matrix, in the loop over inputs."""
    width = CHUNK_LANES
    if matrix.num_groups:
        width = LANES if matrix.packed else group_depth(matrix, sizes)
    return width * whole_unroll(matrix.num_bytes // width, sizes.unroll)


def keeps_halves(matrix: Matrix, dtype: Any) -> bool:
    """Whether registers hold pairs of outputs that are no neighbours; even and odd ones then stay apart."""
    return matrix.packed and dtype == jnp.bfloat16


def _kernel(
    layer_ref: Ref,  # SMEM [1]
    x_ref: Ref,  # VMEM [M, I]
    *refs: Ref,  # scales of rows [T, 1]; the matrix's; out [T, o]; scales and zeros [halves, G, own]
    num_inputs: int,
    num_planes: int,
    dtype: Any,
    sizes: Sizes,
    has_zeros: bool,
    num_outputs: int,
) -> None:
    row_scale_ref, matrix, out_ref, scratch = split_refs(refs, dtype, num_inputs, has_zeros)
    if matrix.num_groups:
        whole = num_outputs % out_ref.shape[1] == 0
        num_own = None if whole else num_outputs - pl.program_id(0) * out_ref.shape[1]
        _multiply_groups(x_ref, matrix, out_ref, scratch, dtype, sizes, num_own)
        return
    sums = _channel_sums(x_ref, matrix, out_ref.shape[1], sizes.unroll)
    scale_1o = matrix.channel_scales(layer_ref[0])
    if row_scale_ref is None:
        out = sums * scale_1o
    else:
        out = scaled_integers(sums, num_planes, row_scale_ref[...], scale_1o)
    out_ref[...] = out.astype(out_ref.dtype)


def _channel_sums(x_ref: Ref, matrix: Matrix, num_outputs: int, unroll: int) -> jax.Array:
    """[M, o], unscaled."""

    def add(first: Scalar, width: int, sums: jax.Array) -> jax.Array:
        return sums + dot(x_ref[:, pl.ds(first, width)], matrix.part(first, width, x_ref.dtype))

    def step(number: jax.Array, sums: jax.Array) -> jax.Array:
        return add(pl.multiple_of(number * CHUNK_LANES, CHUNK_LANES), CHUNK_LANES, sums)

    num_chunks, rest = divmod(matrix.num_inputs, CHUNK_LANES)
    sums = jnp.zeros((x_ref.shape[0], num_outputs), sum_type(x_ref.dtype))
    sums = unrolled_loop(num_chunks, step, sums, unroll)
    return add(num_chunks * CHUNK_LANES, rest, sums) if rest else sums


def _multiply_groups(
    x_ref: Ref,
    matrix: Matrix,
    out_ref: Ref,
    scratch: list[Ref],
    dtype: Any,
    sizes: Sizes,
    num_own: Scalar | None,
) -> None:
    biased = keeps_halves(matrix, dtype)
    num_outputs = out_ref.shape[1]
    own = num_outputs // 2 if biased else num_outputs
    _spread(matrix, scratch, biased, num_own)
    depth = group_depth(matrix, sizes)
    width = LANES if matrix.packed else depth
    pieces = 2 if matrix.packed and depth == LANES else 1

    def step(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        begin = pl.multiple_of(number * width, width)
        parts = matrix.biased_parts(begin) if biased else [matrix.part(begin, width, dtype)]
        for piece in range(pieces):
            first = pl.multiple_of((number * pieces + piece) * depth, depth)
            cut = [part[:, piece * depth : (piece + 1) * depth] for part in parts]
            sums = _add_groups(x_ref, first, depth, cut, matrix, scratch, sums, dtype)
        return sums

    zeros = tuple(jnp.zeros((x_ref.shape[0], own), jnp.float32) for _ in range(num_outputs // own))
    sums = unrolled_loop(matrix.num_bytes // width, step, zeros, sizes.unroll)
    sums = [part.astype(out_ref.dtype) for part in sums]
    out_ref[...] = (interleaved(*sums) if biased else sums[0]).astype(out_ref.dtype)


def _spread(matrix: Matrix, scratch: list[Ref], biased: bool, num_own: Scalar | None) -> None:
    """Scales, and zeros if there are any, in float32: those of even outputs, then those of odd ones."""
    scales = matrix.scales[0]
    if num_own is not None:
        # What is past the matrix may be a NaN, which no product with zero silences.
        column = lax.broadcasted_iota(jnp.int32, scales.shape, 1)
        scales = jnp.where(column < num_own, scales.astype(jnp.float32), 0.0).astype(scales.dtype)
    arrays = [scales, *([] if matrix.zeros is None else [matrix.group_zeros()])]
    for ref, array in zip(scratch, arrays, strict=True):
        for half, part in enumerate(halves(array) if biased else [array]):
            ref[half] = part.astype(jnp.float32)


def _add_groups(
    x_ref: Ref,
    first: Scalar,
    depth: int,
    parts: list[jax.Array],
    matrix: Matrix,
    scratch: list[Ref],
    sums: tuple[jax.Array, ...],
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """Sums `[M, own outputs]` with the products of `depth` inputs added; parts are `[own outputs, depth]`."""
    num_rows, group = x_ref.shape[0], matrix.group
    per_part = max(1, depth // group)
    x = x_ref[:, pl.ds(first, depth)]
    if per_part > 1:
        group_1c = lax.broadcasted_iota(jnp.int32, (1, depth), 1) // group
        x = jnp.concatenate([jnp.where(group_1c == g, x, 0.0) for g in range(per_part)], axis=0)
    added = middle(matrix) + (NIBBLE_BIAS if len(parts) == 2 else 0)
    x_sums = jnp.sum(x, axis=1, keepdims=True)
    results: list[jax.Array] = []
    for half, (part, total) in enumerate(zip(parts, sums, strict=True)):
        products = dot(x.astype(dtype), part)
        for g in range(per_part):
            rows = slice(g * num_rows, (g + 1) * num_rows)
            row = pl.ds(lax.div(first, jnp.int32(group)) + g, 1)
            product = products[rows]
            if len(scratch) == 2:
                shift = scratch[1][half, row, :] + (NIBBLE_BIAS if len(parts) == 2 else 0)
                product = product - x_sums[rows] * shift
            elif added:
                product = product - x_sums[rows] * added
            total = total + product * scratch[0][half, row, :]  # noqa: PLW2901
        results.append(total)
    return tuple(results)
