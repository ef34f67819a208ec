"""Blocks of pages on their way from HBM into a ring of buffers in VMEM, and as operands of the matrix unit.

Axes: p pages of a block, t = p * page_size positions of a block, K kv heads, h head size.
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

from pallas_kernels.eighths import EIGHTH, FP8_UNIT, from_finite_fp8
from pallas_kernels.page_layout import LANES, PageLayout

Ref = Any
"""A reference to memory inside a kernel."""
Scalar = jax.Array | int


def ring_types(layout: PageLayout, pages_per_block: int, num_buffers: int) -> list[Any]:
    """Scratch for a PageRing: the pages, their scales if the layout has any, and a semaphore a buffer."""
    pages = pltpu.VMEM((num_buffers, pages_per_block, layout.rows, LANES), jnp.dtype(layout.storage))
    scales = pltpu.VMEM((num_buffers, pages_per_block, layout.scale_rows, LANES), jnp.float32)
    return [pages, *([scales] if layout.quantised else []), pltpu.SemaphoreType.DMA((num_buffers,))]


def split_refs(
    layout: PageLayout, refs: Sequence[Ref]
) -> tuple[list[Ref | None], Ref, list[Ref | None], list[Ref]]:
    """A kernel's references from the pool on: pool and scales, the result, the ring's, the rest."""
    if layout.quantised:
        pool_ref, scales_ref, out_ref, pages_ref, page_scales_ref, semaphores_ref, *rest = refs
        return [pool_ref, scales_ref], out_ref, [pages_ref, page_scales_ref, semaphores_ref], rest
    pool_ref, out_ref, pages_ref, semaphores_ref, *rest = refs
    return [pool_ref, None], out_ref, [pages_ref, None, semaphores_ref], rest


@dataclass(frozen=True)
class PageRing:
    """The buffers, and what may be done with one of them.

    Between `clear` and the end of the kernel no buffer holds a NaN among its values, whatever the pool holds
    where nothing was written: only whole pages are fetched, and `drop_unwritten` clears the rest of the first
    and of the last one. A weight of zero then silences a value. Keys need no such care: a score that may
    not be seen is replaced, not multiplied.
    """

    layout: PageLayout
    pool_ref: Ref
    """[num_layers * num_pages, rows, 128] in HBM."""
    scales_ref: Ref | None
    """[num_layers * num_pages, scale_rows, 128] in HBM."""
    pages_ref: Ref
    """[num_buffers, p, rows, 128]."""
    page_scales_ref: Ref | None
    """[num_buffers, p, scale_rows, 128]."""
    semaphores_ref: Ref
    """[num_buffers]; counts what arrived in a buffer."""
    eighths: bool = False
    """Whether the matrix units are given fp8 as EIGHTHs, among which there is no NaN here."""

    @property
    def num_buffers(self) -> int:
        return self.pages_ref.shape[0]

    @property
    def pages_per_block(self) -> int:
        return self.pages_ref.shape[1]

    @property
    def block_tokens(self) -> int:
        return self.pages_per_block * self.layout.page_size

    def clear(self) -> None:
        """Zeros in all buffers; where there is no NaN they need none."""
        if not self._has_nan:
            return

        def clear_page(index: jax.Array, _: None) -> None:
            slot, page = index // self.pages_per_block, index % self.pages_per_block
            self.pages_ref[slot, page] = jnp.zeros_like(self.pages_ref[slot, page])

        lax.fori_loop(0, self.num_buffers * self.pages_per_block, clear_page, None)

    def start(
        self, slot: Scalar, block: Scalar, low: Scalar, high: Scalar, page_id: Callable[[int], Scalar]
    ) -> None:
        """Begin to fetch the pages of a block that hold any of the positions [low, high).

        page_id: from a page's number within the block to its place in the pool; any number may be asked for.
        """
        begin, end = self._wanted(block, low, high)
        for page in range(self.pages_per_block):
            source = page_id(page)
            wanted = page < end if isinstance(low, int) else (page < end) & (page >= begin)

            @pl.when(wanted)
            def _(page: int = page, source: Scalar = source) -> None:
                for copy in self._copies(slot, page, source):
                    copy.start()

    def wait(self, slot: Scalar, block: Scalar, low: Scalar, high: Scalar) -> None:
        """Until all that `start` began with these arguments has arrived."""
        begin, end = self._wanted(block, low, high)
        whole = (begin <= 0) & (end >= self.pages_per_block)

        @pl.when(whole)
        def _() -> None:
            # A wait counts the bytes of its destination; where they came from does not matter.
            for buffer in self._buffers(slot):
                pltpu.make_async_copy(buffer, buffer, self.semaphores_ref.at[slot]).wait()

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            def wait_page(_: jax.Array, carry: None) -> None:
                for buffer in self._buffers(slot):
                    pltpu.make_async_copy(buffer.at[0], buffer.at[0], self.semaphores_ref.at[slot]).wait()

            first, last = jnp.maximum(begin, 0), jnp.minimum(end, self.pages_per_block)
            lax.fori_loop(0, last - first, wait_page, None)

    def drop_unwritten(self, slot: Scalar, block: Scalar, low: Scalar, high: Scalar) -> None:
        """Zero what lies outside [low, high) on the pages at both ends."""
        if not self._has_nan:
            return
        page_size, block_start = self.layout.page_size, block * self.block_tokens

        def drop_on_page_of(position: Scalar) -> None:
            page = (position - block_start) // page_size
            values = self.pages_ref[slot, page]
            token = lax.broadcasted_iota(jnp.int32, values.shape, 0) % page_size
            first = block_start + page * page_size
            keep = (token >= low - first) & (token < high - first)
            self.pages_ref[slot, page] = jnp.where(keep, values, jnp.zeros_like(values))

        @pl.when((high % page_size != 0) & (high - block_start <= self.block_tokens))
        def _() -> None:
            drop_on_page_of(high - 1)

        @pl.when((low % page_size != 0) & (low >= block_start))
        def _() -> None:
            drop_on_page_of(low)

    @property
    def unit(self) -> float:
        """What a stored number is, by that which is multiplied in its place."""
        return FP8_UNIT if self.eighths else 1.0

    def keys(self, slot: Scalar, head: Scalar) -> list[jax.Array]:
        """The planes `[t, 128]` that hold a head's keys, as they are stored."""
        return [self._plane(slot, head, plane) for plane in range(self._key_planes)]

    def values(self, slot: Scalar, head: Scalar) -> list[jax.Array]:
        """The planes `[t, 128]` that hold a head's values, as they are stored; in a shared plane they are the
        upper lanes."""
        planes = range(self.layout.planes - self._key_planes, self.layout.planes)
        return [self._plane(slot, head, plane) for plane in planes]

    def operand(self, plane: jax.Array, compute: jnp.dtype) -> jax.Array:
        """What is multiplied in its place, smaller by `unit`."""
        if self.eighths:
            return pltpu.bitcast(from_finite_fp8(pltpu.bitcast(plane, jnp.uint32)), EIGHTH)
        return plane.astype(compute)

    def scale_rows(
        self, slot: Scalar, head: Scalar
    ) -> tuple[list[jax.Array], list[jax.Array]] | tuple[None, None]:
        """A head's key scales and value scales, as rows `[1, 128]` of the block's positions; None if none."""
        scales_ref = self.page_scales_ref
        if scales_ref is None:
            return None, None
        rows_per_head = 2 * self.layout.page_size // LANES

        def row(page: int, number: int) -> jax.Array:
            return scales_ref[slot, page, pl.ds(head * rows_per_head + number, 1), :]

        if rows_per_head > 1:
            half = rows_per_head // 2
            pages = range(self.pages_per_block)
            return (
                [row(page, number) for page in pages for number in range(half)],
                [row(page, half + number) for page in pages for number in range(half)],
            )
        # A page's 64 key scales, then its 64 value scales: two pages make a row of each.
        lower = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) < LANES // 2
        keys: list[jax.Array] = []
        values: list[jax.Array] = []
        for page in range(0, self.pages_per_block, 2):
            even, odd = row(page, 0), row(page + 1, 0)
            keys.append(jnp.where(lower, even, pltpu.roll(odd, LANES // 2, axis=1)))
            values.append(jnp.where(lower, pltpu.roll(even, LANES // 2, axis=1), odd))
        return keys, values

    @property
    def _has_nan(self) -> bool:
        return jnp.issubdtype(jnp.dtype(self.layout.storage), jnp.floating) and not self.eighths

    @property
    def _key_planes(self) -> int:
        return max(self.layout.planes // 2, 1)

    def _plane(self, slot: Scalar, head: Scalar, plane: int) -> jax.Array:
        page_size = self.layout.page_size
        first = (head * self.layout.planes + plane) * page_size
        if isinstance(first, jax.Array):
            first = pl.multiple_of(first, page_size)
        rows = self.pages_ref[slot, :, pl.ds(first, page_size), :]
        return rows.reshape(self.block_tokens, LANES)

    def _wanted(self, block: Scalar, low: Scalar, high: Scalar) -> tuple[Scalar, Scalar]:
        """The first page, and the one after the last, that hold any of [low, high), counted in the block."""
        page_size, first = self.layout.page_size, block * self.pages_per_block
        return _div(low, page_size) - first, _div(high + page_size - 1, page_size) - first

    def _buffers(self, slot: Scalar) -> list[Ref]:
        refs = [self.pages_ref, *([] if self.page_scales_ref is None else [self.page_scales_ref])]
        return [ref.at[slot] for ref in refs]

    def _copies(self, slot: Scalar, page: int, source: Scalar) -> list[Any]:
        sources = [self.pool_ref, *([] if self.scales_ref is None else [self.scales_ref])]
        return [
            pltpu.make_async_copy(ref.at[source], buffer.at[page], self.semaphores_ref.at[slot])
            for ref, buffer in zip(sources, self._buffers(slot), strict=True)
        ]


def _div(a: Scalar, b: int) -> Scalar:
    """Of numbers that are not negative: rounding towards zero, which takes one instruction."""
    return a // b if isinstance(a, int) else lax.div(a, b)
