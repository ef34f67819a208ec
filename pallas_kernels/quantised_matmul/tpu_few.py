"""Few rows: a matrix's tiles stream through, and are widened as they pass.

Where rows are bfloat16, the matrix units of most chips widen fp8 and four bits themselves (`EIGHTH`).
Scales of groups are multiplied with the sums of their inputs, and not with each weight: where 128 inputs are
several groups, each row is multiplied once for each with the others' inputs cleared. Zeros are taken off the
sums: each group's times its scale and the sum of a row's own inputs.

Axes: M rows of x (of int8 the upper halves, then the lower ones), o outputs of a tile, b of a block of it,
c inputs of a chunk, G groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    unrolled_loop,
    whole_unroll,
)

CHUNK_LANES = 256
"""Bytes of each row that are widened and multiplied together where channels have scales."""


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
    rows = [x_MI, *([] if row_scale_T1 is None else [row_scale_T1])]
    if groups:
        # Whole registers of 32 bits, for rows that are cleared in part and put one below the other.
        x_MI = x_MI.astype(jnp.float32)
        rows = [x_MI]
        if has_zeros(matrix):
            rows.append(x_MI.reshape(-1, groups, matrix.group).sum(axis=2))

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0, 0))

    return pl.pallas_call(
        functools.partial(
            _kernel,
            num_inputs=matrix.num_inputs,
            num_planes=num_planes,
            beside_rows=len(rows) > 1,
            dtype=dtype,
            sizes=sizes,
            stored_zeros=matrix.zeros is not None,
            has_bias=matrix.bias is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(matrix.num_outputs, sizes.outputs),),
            in_specs=[*map(whole, rows), *matrix.specs(sizes.outputs)],
            out_specs=pl.BlockSpec((sizes.rows, sizes.outputs), lambda o, _: (0, o)),
            scratch_shapes=[pltpu.VMEM((groups, sizes.outputs), jnp.float32)] if groups else [],
        ),
        out_shape=jax.ShapeDtypeStruct((sizes.rows, matrix.num_outputs), out_type),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True, vmem_limit_bytes=64 << 20
        ),
        interpret=interpret,
        name="quantised_matmul_few",
    )(layer_1, *rows, *matrix.operands())


def has_zeros(matrix: Matrix) -> bool:
    """Whether what is stored is not the number itself."""
    return matrix.zeros is not None or middle(matrix) != 0


def trips(matrix: Matrix, sizes: Sizes) -> int:
    """Of the loop over inputs, for a block of outputs."""
    width = LANES if matrix.num_groups else CHUNK_LANES
    length = matrix.num_bytes // width
    return length // whole_unroll(length, sizes.unroll(width)) if length else 0


def _kernel(
    layer_ref: Ref,  # SMEM [1]
    x_ref: Ref,  # VMEM [M, I]
    *refs: Ref,  # scales of rows [T, 1] or sums of groups [M, G]; the matrix's; out [T, o]; scales [G, o]
    num_inputs: int,
    num_planes: int,
    beside_rows: bool,
    dtype: Any,
    sizes: Sizes,
    stored_zeros: bool,
    has_bias: bool,
) -> None:
    layer = layer_ref[0]
    beside_ref, matrix, out_ref, scratch = split_refs(refs, beside_rows, num_inputs, stored_zeros, has_bias)
    if matrix.num_groups:
        _multiply_groups(x_ref, beside_ref, matrix, layer, out_ref, scratch[0], dtype, sizes)
        return
    scale_1o = matrix.channel_scales(layer)
    for block in blocks(out_ref.shape[1], sizes):
        sums = _channel_sums(x_ref, matrix, block, sizes)
        if beside_ref is None:
            out = sums * scale_1o[:, block]
        else:
            out = scaled_integers(sums, num_planes, beside_ref[...], scale_1o[:, block])
        out_ref[:, block] = matrix.with_bias(out, layer, block).astype(out_ref.dtype)


def blocks(num_outputs: int, sizes: Sizes) -> list[slice]:
    """Outputs whose sums are in registers at the same time."""
    width = min(sizes.block, num_outputs)
    return [slice(first, min(first + width, num_outputs)) for first in range(0, num_outputs, width)]


def takes_eighths(matrix: Matrix, dtype: Any, sizes: Sizes) -> bool:
    """Whether the matrix unit is given EIGHTHs to multiply with rows of this type."""
    return sizes.eighths and dtype == jnp.bfloat16 and matrix.values.dtype != jnp.int8


def _channel_sums(x_ref: Ref, matrix: Matrix, block: slice, sizes: Sizes) -> jax.Array:
    """[M, b], unscaled."""
    eighths = takes_eighths(matrix, x_ref.dtype, sizes)
    part = _part(matrix, x_ref.dtype, block, eighths)

    def add(first: Scalar, width: int, sums: jax.Array) -> jax.Array:
        return sums + dot(x_ref[:, pl.ds(first, width)], part(first, width))

    def step(number: jax.Array, sums: jax.Array) -> jax.Array:
        return add(pl.multiple_of(number * CHUNK_LANES, CHUNK_LANES), CHUNK_LANES, sums)

    num_chunks, rest = divmod(matrix.num_inputs, CHUNK_LANES)
    sums = jnp.zeros((x_ref.shape[0], block.stop - block.start), sum_type(x_ref.dtype))
    sums = unrolled_loop(num_chunks, step, sums, sizes.unroll(CHUNK_LANES))
    sums = add(num_chunks * CHUNK_LANES, rest, sums) if rest else sums
    return sums * matrix.unit if eighths else sums


def _part(matrix: Matrix, dtype: Any, block: slice, eighths: bool) -> Callable[[Scalar, int], jax.Array]:
    """From the first of some bytes of each row, and their number, to what is multiplied with rows."""
    if eighths:
        return lambda first, num_bytes: matrix.eighths(first, num_bytes, block)
    return lambda first, num_bytes: matrix.part(first, num_bytes, dtype, block)


def _multiply_groups(
    x_ref: Ref,
    group_sums_ref: Ref | None,
    matrix: Matrix,
    layer: Scalar,
    out_ref: Ref,
    scales_ref: Ref,
    dtype: Any,
    sizes: Sizes,
) -> None:
    eighths = takes_eighths(matrix, dtype, sizes)
    scales_ref[...] = matrix.scales[0].astype(jnp.float32) * (matrix.unit if eighths else 1.0)
    per_byte = 2 if matrix.packed else 1
    for block in blocks(out_ref.shape[1], sizes):

        def step(number: jax.Array, sums: jax.Array, block: slice = block) -> jax.Array:
            begin = pl.multiple_of(number * LANES, LANES)
            part = _part(matrix, dtype, block, eighths)(begin, LANES)
            for half in range(per_byte):
                first = pl.multiple_of((number * per_byte + half) * LANES, LANES)
                own = part[:, half * LANES : (half + 1) * LANES]
                sums = _add_groups(x_ref, first, own, matrix, scales_ref, block, sums, dtype)
            return sums

        if group_sums_ref is None:
            sums = jnp.zeros((x_ref.shape[0], block.stop - block.start), jnp.float32)
        else:
            sums = -_zeros_share(group_sums_ref[...], matrix, block)
        sums = unrolled_loop(matrix.num_bytes // LANES, step, sums, sizes.unroll(LANES))
        out_ref[:, block] = matrix.with_bias(sums, layer, block).astype(out_ref.dtype)


def _zeros_share(group_sums_MG: jax.Array, matrix: Matrix, block: slice) -> jax.Array:
    """[M, b]: what zeros add to sums that take stored numbers for the numbers themselves."""
    scales_Gb = matrix.scales[0, :, block]
    contracted = (((1,), (0,)), ((), ()))
    if matrix.zeros is None and scales_Gb.dtype == jnp.bfloat16:
        # Sums of float32 are three numbers of bfloat16: three products instead of the six of any two float32.
        parts, rest = [], group_sums_MG * middle(matrix)
        for _ in range(3):
            parts.append(rest.astype(jnp.bfloat16).astype(jnp.float32))
            rest = rest - parts[-1]
        rows = jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)
        shares = lax.dot_general(rows, scales_Gb, contracted, preferred_element_type=jnp.float32)
        high, middle_part, low = jnp.split(shares, 3)
        return high + middle_part + low
    shift_Gb = middle(matrix) if matrix.zeros is None else matrix.group_zeros(block)
    return lax.dot_general(
        group_sums_MG,
        scales_Gb.astype(jnp.float32) * shift_Gb,
        contracted,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _add_groups(
    x_ref: Ref,
    first: Scalar,
    part: jax.Array,
    matrix: Matrix,
    scales_ref: Ref,
    block: slice,
    sums: jax.Array,
    dtype: Any,
) -> jax.Array:
    """Sums `[M, b]` with the scaled products of 128 inputs added; their part of the matrix is `[b, 128]`."""
    num_rows, group = x_ref.shape[0], matrix.group
    per_part = max(1, LANES // group)
    x = x_ref[:, pl.ds(first, LANES)]
    if per_part > 1:
        group_1c = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) // group
        x = jnp.concatenate([jnp.where(group_1c == g, x, 0.0) for g in range(per_part)], axis=0)
    products = dot(x.astype(dtype), part)
    for g in range(per_part):
        row = pl.ds(lax.div(first, jnp.int32(group)) + g, 1)
        sums = sums + products[g * num_rows : (g + 1) * num_rows] * scales_ref[row, block]
    return sums
