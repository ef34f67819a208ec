"""The online softmax (Dao et al. 2022, section 3.1) over blocks of pages, in base two.

Axes: K kv heads, M rows of a tile, t positions of a block. The state lies in VMEM; peak and total have 128
lanes: the peak the same in all of them, the total a sum for each, which are added up once at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.page_layout import LANES, PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams
from pallas_kernels.ragged_paged_attention.tpu_pages import PageRing, Ref, Scalar

LOG2E = math.log2(math.e)
MASKED = -1e30
"""Finite, so that a row that has seen nothing yet yields numbers: what it sums until then has a decay of
zero at the first position that it does see."""


@dataclass(frozen=True)
class Softmax:
    out_ref: Ref
    """float32 [K, M, V * 128]: values, weighted and summed up."""
    peak_ref: Ref
    """float32 [K, M, 128]."""
    total_ref: Ref
    """float32 [K, M, 128]."""
    sinks_ref: Ref | None
    """float32 [K, M, 128]."""
    layout: PageLayout
    params: AttentionParams

    def reset(self) -> None:
        """Nothing seen but the sinks."""
        self.out_ref[...] = jnp.zeros_like(self.out_ref)
        if self.sinks_ref is None:
            self.peak_ref[...] = jnp.full_like(self.peak_ref, MASKED)
            self.total_ref[...] = jnp.zeros_like(self.total_ref)
        else:
            self.peak_ref[...] = self.sinks_ref[...] * LOG2E
            lane = lax.broadcasted_iota(jnp.int32, self.total_ref.shape, 2)
            self.total_ref[...] = jnp.where(lane == 0, 1.0, 0.0)

    def result(self) -> jax.Array:
        """float32 [K, M, V * 128], normalised; zero for a row that saw nothing."""
        total = jnp.sum(self.total_ref[...], axis=-1, keepdims=True)
        return self.out_ref[...] / jnp.where(total == 0.0, 1.0, total)

    def reduce(
        self,
        head: Scalar,
        rows: Any,
        q: jax.Array,
        ring: PageRing,
        slot: Scalar,
        block_start: Scalar,
        last: Scalar | jax.Array | None,
    ) -> None:
        """Take in a block for some rows of one head.

        Args:
            rows: which of M, a slice.
            q: their queries `[rows, W]`, the planes side by side.
            block_start: the block's first position.
            last: the last position that a row sees, one for all or `[rows, 1]`; None if all see all.
        """
        score = self._scores(head, q, ring, slot)
        visible = None if last is None else self._visible(score.shape, last - block_start)
        if visible is not None:
            score = jnp.where(visible, score, MASKED)
        old_peak = self.peak_ref[head, rows]
        peak = jnp.maximum(old_peak, jnp.max(score, axis=-1, keepdims=True))
        weight = jnp.exp2(score - peak[:, :1])
        decay = jnp.exp2(old_peak - peak)
        self.peak_ref[head, rows] = peak
        self.total_ref[head, rows] = self.total_ref[head, rows] * decay + sum(_chunks(weight))
        if self.layout.quantised:
            weight = _times_rows(weight, ring.scale_rows(slot, head)[1])
            if visible is not None:
                weight = jnp.where(visible, weight, 0.0)
        weight = weight.astype(q.dtype)
        for plane, values in enumerate(ring.values(slot, head, q.dtype)):
            lanes = pl.ds(plane * LANES, LANES)
            product = _dot(weight, values, ((1,), (0,)))
            self.out_ref[head, rows, lanes] = self.out_ref[head, rows, lanes] * decay + product

    def _visible(self, shape: tuple[int, ...], last: Scalar | jax.Array) -> jax.Array:
        """Which positions of a block are seen, `last` being counted from its start."""
        position = lax.broadcasted_iota(jnp.int32, shape, 1)
        visible = position <= last
        return visible & (position > last - self.params.window) if self.params.window else visible

    def _scores(self, head: Scalar, q: jax.Array, ring: PageRing, slot: Scalar) -> jax.Array:
        """float32 `[M, t]`, in base two."""
        params = self.params
        planes = ring.keys(slot, head, q.dtype)
        score = sum(
            _dot(q[:, i * LANES : (i + 1) * LANES], plane, ((1,), (1,))) for i, plane in enumerate(planes)
        )
        if self.layout.quantised:
            score = _times_rows(score, ring.scale_rows(slot, head)[0])
        if params.softcap:
            return jnp.tanh(score * (params.scale / params.softcap)) * (params.softcap * LOG2E)
        return score * (params.scale * LOG2E)


def _chunks(x: jax.Array) -> list[jax.Array]:
    """`[M, t]` as pieces of 128 lanes."""
    return [x[:, first : first + LANES] for first in range(0, x.shape[1], LANES)]


def _times_rows(x: jax.Array, rows: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([chunk * row for chunk, row in zip(_chunks(x), rows, strict=True)], axis=1)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[tuple[int], tuple[int]]) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (axes, ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
