"""The online softmax (Dao et al. 2022, section 3.1) over blocks of pages, in base two.

Axes: K kv heads, M rows of a tile, t positions of a block. The state lies in VMEM; peak and total have 128
lanes: the peak the same in all of them, the total a sum for each, which are added up once at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.page_layout import LANES, PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams
from pallas_kernels.ragged_paged_attention.tpu_pages import Ref, Scalar

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
    unit: float
    """What a stored key or value is, by what is multiplied in its place."""

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

    def logarithm(self) -> jax.Array:
        """float32 [K, M, 128]: in base two, of each row's sum of exponentials, the same in all lanes."""
        total = jnp.sum(self.total_ref[...], axis=-1, keepdims=True)
        return self.peak_ref[...] + jnp.log2(jnp.maximum(total, jnp.finfo(jnp.float32).tiny))

    def at(self, head: Scalar, rows: Any) -> Softmax:
        """The state of some rows of one head, `[rows, lanes]` each."""
        refs = self.out_ref, self.peak_ref, self.total_ref
        out_ref, peak_ref, total_ref = (ref.at[head, rows] for ref in refs)
        return dataclasses.replace(self, out_ref=out_ref, peak_ref=peak_ref, total_ref=total_ref)

    def scores(
        self, q: jax.Array, keys: list[jax.Array], scales: list[jax.Array] | None, last: Scalar | None
    ) -> jax.Array:
        """Scores in base two, float32 `[M, t]`.

        Args:
            q: queries `[M, W]`, the planes side by side.
            keys: the planes `[t, 128]`, as `PageRing.operand` returns them.
            scales: rows `[1, 128]` of the keys' scales, or None.
            last: the last position that a row sees, counted from the block's first, one for all or
                `[M, 1]`; None if all see all.
        """
        params = self.params
        products = [
            _dot(q[:, i * LANES : (i + 1) * LANES], plane, ((1,), (1,))) for i, plane in enumerate(keys)
        ]
        score = functools.reduce(jnp.add, products)
        if scales is not None:
            score = _times_rows(score, scales)
        scale = params.scale * self.unit
        if params.softcap:
            score = jnp.tanh(score * (scale / params.softcap)) * (params.softcap * LOG2E)
        else:
            score = score * (scale * LOG2E)
        if last is not None:
            score = jnp.where(self._visible(score.shape, last), score, MASKED)
        return score

    def weigh(
        self, score: jax.Array, scales: list[jax.Array] | None, compute: jnp.dtype, masked: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Take a block into peaks and totals. Returns what its values count for, `[M, t]`, and what is left
        of all before, `[M, 128]`, the same in all lanes.

        Args:
            score: what `scores` returned.
            scales: rows `[1, 128]` of the values' scales, or None.
            compute: the type in which weights and values are multiplied.
            masked: whether any of the scores stands for a position that must not be seen.
        """
        old_peak = self.peak_ref[...]
        peak = jnp.maximum(old_peak, jnp.max(score, axis=-1, keepdims=True))
        weights = [jnp.exp2(chunk - peak) for chunk in _chunks(score)]
        decay = jnp.exp2(old_peak - peak)
        self.peak_ref[...] = peak
        self.total_ref[...] = self.total_ref[...] * decay + functools.reduce(jnp.add, weights)
        weight = jnp.concatenate(weights, axis=1)
        if scales is not None:
            scaled = _times_rows(weight, [row * self.unit for row in scales])
            # The scale of a position that nobody wrote may be NaN.
            weight = jnp.where(score > MASKED, scaled, 0.0) if masked else scaled
        return weight.astype(compute), decay

    def add(self, weight: jax.Array, decay: jax.Array, values: list[jax.Array]) -> None:
        """Take in a block's values, planes as `PageRing.operand` returns them, by what `weigh` returned."""
        for plane, value in enumerate(values):
            lanes = pl.ds(plane * LANES, LANES)
            product = _dot(weight, value, ((1,), (0,)))
            self.out_ref[:, lanes] = self.out_ref[:, lanes] * decay + product

    def _visible(self, shape: tuple[int, ...], last: Any) -> jax.Array:
        """Which positions of a block are seen, `last` being counted from its start."""
        position = lax.broadcasted_iota(jnp.int32, shape, 1)
        visible = jnp.less_equal(position, last)
        return visible & (position > last - self.params.window) if self.params.window else visible


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
