"""What both kernels know of a stack of matrices and do with a tile of one.

Axes: L layers, O outputs, o outputs of a tile, B bytes of a row, c inputs of a chunk, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.eighths import EIGHTH, FP8_UNIT, from_fp8
from pallas_kernels.quantised_matmul.reference import MIDDLE_OF_NIBBLE, index_in

LANES, SUBLANES = 128, 8
NIBBLE_UNIT = 2.0**13
"""What four bits are, by the EIGHTH of the same bits."""
Ref = Any
"""A reference to memory inside a kernel."""
Scalar = jax.Array | int


@dataclass(frozen=True)
class Sizes:
    """What is tuned."""

    rows: int
    """Of a tile of x, twice as many where a row is two of int8."""
    outputs: int
    """Of a tile of the matrix, a multiple of 256."""
    block: int
    """Outputs of a tile whose sums are in registers at the same time, of few rows."""
    body: int
    """Bytes of each row of the matrix in one iteration of the loop over inputs, at most."""
    many: bool
    """Whether the matrix is widened once for several tiles of rows."""
    eighths: bool
    """Whether the matrix unit takes EIGHTHs beside bfloat16."""

    def unroll(self, width: int) -> int:
        """Iterations over so many bytes that are scheduled as one, at most."""
        return max(1, self.body // width)


@dataclass(frozen=True)
class Matrix:
    """A stack of matrices and what belongs to it, as arrays or, in a kernel, as references to tiles."""

    values: Any
    """[L, O, B]; of a tile [1, o, B]."""
    scales: Any
    """[L, O] or [L, G, O]; of a tile [up to 8 layers, o] or [1, G, o]."""
    zeros: Any
    """None or [L, G, O]; of a tile [1, G, o]."""
    num_inputs: int
    bias: Any = None
    """None or [L, O]; of a tile [up to 8 layers, o]."""

    @property
    def num_outputs(self) -> int:
        return self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.shape[2]

    @property
    def packed(self) -> bool:
        """Whether a byte is two numbers."""
        return self.values.dtype == jnp.uint8

    @property
    def num_groups(self) -> int:
        """0 for channels."""
        return self.scales.shape[1] if len(self.scales.shape) == 3 else 0

    @property
    def group(self) -> int:
        """Inputs of one."""
        return self.num_inputs // self.num_groups

    def operands(self) -> list[jax.Array]:
        beside = [array for array in (self.zeros, self.bias) if array is not None]
        return [self.values, self.scales, *beside]

    def specs(self, outputs: int) -> list[pl.BlockSpec]:
        """Of tiles of so many outputs; the grid's first axis counts them, the first scalar is the layer."""
        specs = [pl.BlockSpec((1, outputs, self.num_bytes), lambda o, *rest: (rest[-1][0], o, 0))]
        return specs + [
            self._grouped_spec(array, outputs) if array.ndim == 3 else self._channel_spec(array, outputs)
            for array in self.operands()[1:]
        ]

    def _grouped_spec(self, array: jax.Array, outputs: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, self.num_groups, outputs), lambda o, *rest: (index_in(array, rest[-1][0]), 0, o)
        )

    def _channel_spec(self, array: jax.Array, outputs: int) -> pl.BlockSpec:
        layers = min(SUBLANES, array.shape[0])
        return pl.BlockSpec((layers, outputs), lambda o, *rest: (index_in(array, rest[-1][0]) // SUBLANES, o))

    def channel_scales(self, layer: Scalar) -> jax.Array:
        """Float32 [1, o] of a tile."""
        return _row_of(self.scales, layer)

    def with_bias(self, out: jax.Array, layer: Scalar, block: slice = slice(None)) -> jax.Array:
        """Float32 [T, o] of a tile, or of a block of its outputs, with their bias if there is one."""
        if self.bias is None:
            return out
        return out + _row_of(self.bias, layer, block).astype(jnp.float32)

    def group_zeros(self, block: slice = slice(None)) -> jax.Array:
        """Float32 [G, o] of a tile, or of a block of its outputs."""
        return self.zeros[0, :, block].astype(jnp.int32).astype(jnp.float32)

    def part(self, first: Scalar, num_bytes: int, dtype: Any, block: slice = slice(None)) -> jax.Array:
        """`[o, c]`: the numbers of some bytes of each row as they are stored, of four bits those of 128."""
        tile = self.values[0, block, pl.ds(first, num_bytes)]
        if self.packed:
            tile = jnp.concatenate([pltpu.bitcast(half, jnp.int8) for half in _nibbles(tile)], axis=1)
        return tile.astype(dtype)

    def eighths(self, first: Scalar, num_bytes: int, block: slice) -> jax.Array:
        """`part` of fp8 or of four bits in EIGHTHs, smaller by `unit`."""
        tile = self.values[0, block, pl.ds(first, num_bytes)]
        if self.packed:
            return jnp.concatenate([pltpu.bitcast(half, EIGHTH) for half in _nibbles(tile)], axis=1)
        return pltpu.bitcast(from_fp8(pltpu.bitcast(tile, jnp.uint32)), EIGHTH)

    @property
    def unit(self) -> float:
        """What a number is, by its EIGHTH."""
        return NIBBLE_UNIT if self.packed else FP8_UNIT


def _row_of(ref: Ref, layer: Scalar, block: slice = slice(None)) -> jax.Array:
    """[1, o]: a layer's row of a tile [up to 8 layers, o]."""
    row = lax.rem(layer, jnp.int32(SUBLANES)) if ref.shape[0] > 1 else 0
    return ref[pl.ds(row, 1), block]


def _nibbles(packed: jax.Array) -> list[jax.Array]:
    """uint32: of four bytes each the lower halves, then the upper ones."""
    words = pltpu.bitcast(packed, jnp.uint32)
    return [(words >> jnp.uint32(shift)) & jnp.uint32(0x0F0F0F0F) for shift in (0, 4)]


def split_refs(
    refs: Sequence[Ref], beside_rows: bool, num_inputs: int, stored_zeros: bool, has_bias: bool
) -> tuple[Ref | None, Matrix, Ref, list[Ref]]:
    """A kernel's references after x: what else there is of rows, the matrix, the result, the rest."""
    beside_ref = zeros_ref = bias_ref = None
    if beside_rows:
        beside_ref, *refs = refs
    values_ref, scales_ref, *refs = refs
    if stored_zeros:
        zeros_ref, *refs = refs
    if has_bias:
        bias_ref, *refs = refs
    out_ref, *refs = refs
    return beside_ref, Matrix(values_ref, scales_ref, zeros_ref, num_inputs, bias_ref), out_ref, refs


def sum_type(dtype: Any) -> Any:
    """Of sums of products."""
    return jnp.int32 if dtype == jnp.int8 else jnp.float32


def unrolled_loop(length: int, step: Callable[[Any, Any], Any], init: Any, unroll: int) -> Any:
    """A loop whose body is several steps, so that one's arithmetic hides another's latency."""
    return lax.fori_loop(0, length, step, init, unroll=whole_unroll(length, unroll))


def whole_unroll(length: int, most: int) -> int:
    """How many steps are one body, in a loop of so many: a divisor."""
    return max(d for d in range(1, most + 1) if length % d == 0) if length else 1


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """Contracted over the last axes: float32, of integers int32."""
    return lax.dot_general(
        x,
        w,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=sum_type(x.dtype),
    )


def scaled_integers(
    sums: jax.Array, num_planes: int, row_scale_T1: jax.Array, scale_1o: jax.Array
) -> jax.Array:
    """Float32 [T, o] of integer sums [T, o], or [2 T, o] of rows' upper and lower halves."""
    if num_planes == 2:
        half = sums.shape[0] // 2
        sums = (sums[:half] << 7) + sums[half:]
    return sums.astype(jnp.float32) * (row_scale_T1 * scale_1o)


def middle(matrix: Matrix) -> float:
    """What stands for zero where groups have none of their own."""
    return float(MIDDLE_OF_NIBBLE) if matrix.packed else 0.0
