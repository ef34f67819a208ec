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

from pallas_kernels.quantised_matmul.reference import MIDDLE_OF_NIBBLE

LANES, SUBLANES = 128, 8
BIASED_NIBBLE, NIBBLE_BIAS = 0x43004300, 128
"""Two numbers of bfloat16 that are 128 with the last four bits free: whatever is put there is added."""
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
    depth: int
    """Inputs that the matrix unit takes at once."""
    unroll: int
    """Iterations of the loop over inputs that are scheduled as one, at most."""
    many: bool
    """Whether the matrix is widened once for several tiles of rows."""


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
        return [self.values, self.scales, *([] if self.zeros is None else [self.zeros])]

    def specs(self, outputs: int) -> list[pl.BlockSpec]:
        """Of tiles of so many outputs; the grid's first axis counts them, the first scalar is the layer."""
        specs = [pl.BlockSpec((1, outputs, self.num_bytes), lambda o, *rest: (rest[-1][0], o, 0))]
        if self.num_groups:
            by_group = pl.BlockSpec((1, self.num_groups, outputs), lambda o, *rest: (rest[-1][0], 0, o))
            return [*specs, *[by_group] * (1 if self.zeros is None else 2)]
        layers = min(SUBLANES, self.scales.shape[0])
        by_channel = pl.BlockSpec((layers, outputs), lambda o, *rest: (rest[-1][0] // SUBLANES, o))
        return [*specs, by_channel]

    def channel_scales(self, layer: Scalar) -> jax.Array:
        """Float32 [1, o] of a tile."""
        return self.scales[pl.ds(lax.rem(layer, jnp.int32(SUBLANES)), 1), :]

    def group_zeros(self) -> jax.Array:
        """Float32 [G, o] of a tile."""
        return self.zeros[0].astype(jnp.int32).astype(jnp.float32)

    def part(self, first: Scalar, num_bytes: int, dtype: Any) -> jax.Array:
        """`[o, c]`: the numbers of some bytes of each row as they are stored, of four bits those of 128."""
        tile = self.values[0, :, pl.ds(first, num_bytes)]
        if not self.packed:
            return tile.astype(dtype)
        numbers = tile.astype(jnp.int32)
        return jnp.concatenate([numbers & 0x0F, numbers >> 4], axis=1).astype(dtype)

    def biased_parts(self, first: Scalar) -> list[jax.Array]:
        """`[o / 2, c]` in bfloat16: of 128 bytes the numbers of even outputs, then those of odd ones, each
        with NIBBLE_BIAS added.

        A register's word is a byte of four outputs; two that are 16 bits apart become two of bfloat16.
        """
        words = pltpu.bitcast(self.values[0, :, pl.ds(first, LANES)], jnp.uint32)

        def number(shift: int) -> jax.Array:
            bits = (words >> jnp.uint32(shift)) & jnp.uint32(0x000F000F) | jnp.uint32(BIASED_NIBBLE)
            return pltpu.bitcast(bits, jnp.bfloat16)

        return [jnp.concatenate([number(shift), number(shift + 4)], axis=1) for shift in (0, 8)]


def split_refs(
    refs: Sequence[Ref], dtype: Any, num_inputs: int, has_zeros: bool
) -> tuple[Ref | None, Matrix, Ref, list[Ref]]:
    """A kernel's references after x: scales of rows of integers, the matrix, the result, the rest."""
    row_scale_ref = zeros_ref = None
    if jnp.issubdtype(dtype, jnp.integer):
        row_scale_ref, *refs = refs
    values_ref, scales_ref, *refs = refs
    if has_zeros:
        zeros_ref, *refs = refs
    out_ref, *refs = refs
    return row_scale_ref, Matrix(values_ref, scales_ref, zeros_ref, num_inputs), out_ref, refs


def interleaved(even: jax.Array, odd: jax.Array) -> jax.Array:
    """`[n, o]` of its even and its odd columns `[n, o / 2]`: what no vector unit does, a matrix unit can."""
    from_even, from_odd = (_every_second(2 * LANES, offset, even.dtype, LANES) for offset in (0, 1))
    blocks = [slice(first, first + LANES) for first in range(0, even.shape[1], LANES)]
    return jnp.concatenate([dot(even[:, at], from_even) + dot(odd[:, at], from_odd) for at in blocks], axis=1)


def halves(x: jax.Array) -> list[jax.Array]:
    """The even and the odd columns of `[n, o]`, in float32."""
    blocks = [x[:, first : first + 2 * LANES] for first in range(0, x.shape[1], 2 * LANES)]
    return [
        jnp.concatenate(
            [dot(block, _every_second(2 * LANES, offset, x.dtype, LANES).T) for block in blocks], axis=1
        )
        for offset in (0, 1)
    ]


def _every_second(num_rows: int, offset: int, dtype: Any, num_columns: int) -> jax.Array:
    """Zeros with a one at [2 n + offset, n]."""
    row = lax.broadcasted_iota(jnp.int32, (num_rows, num_columns), 0)
    column = lax.broadcasted_iota(jnp.int32, (num_rows, num_columns), 1)
    return jnp.where(row == 2 * column + offset, 1.0, 0.0).astype(dtype)


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
