"""The cases that tests, benchmarks and tuning share, and batches made from them.

A batch has random pages for every sequence, and NaN wherever a format has one in what nobody wrote: the sink
page, pages without an owner, the rest of a sequence's last page, other layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import kv_write
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams

NUM_LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class AttentionCase:
    head_size: int
    num_kv_heads: int
    queries_per_kv: int
    kv_format: str = "float32"
    storage: str = ""
    """The pool's type where it is not the format's own."""
    compute: str = "float32"
    """The type of queries and results."""
    page_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    context_len: tuple[int, ...] = (5, 130, 0, 40, 300)
    num_rows: tuple[int, ...] = (5, 1, 0, 33, 1)
    padded_rows: int = 48

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.queries_per_kv

    def params(self, **changes: bool) -> AttentionParams:
        return AttentionParams(
            self.head_size**-0.5,
            window=self.window,
            softcap=self.softcap,
            context_block=max(128, self.page_size),
            **changes,
        )

    def layout(self) -> PageLayout:
        """A pool of two thirds more pages than the sequences need."""
        used = sum(-(-length // self.page_size) for length in self.context_len)
        return PageLayout(
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            num_pages=used * 5 // 3 + 2,
            kv_format=self.kv_format,
            storage=self.storage or self.kv_format,
        )


CASES = (
    AttentionCase(64, 3, 3),
    AttentionCase(8, 4, 2, window=20),
    AttentionCase(128, 2, 3, page_size=64, window=150, softcap=30.0, sinks=True),
    AttentionCase(80, 1, 4, page_size=32),
    AttentionCase(256, 1, 4, "bfloat16", compute="bfloat16", page_size=64),
    AttentionCase(128, 2, 1, "bfloat16", storage="uint16", compute="bfloat16"),
    AttentionCase(64, 1, 8, "bfloat16", compute="bfloat16"),
    AttentionCase(96, 2, 1, "int8", compute="bfloat16", page_size=64, window=33),
    AttentionCase(128, 1, 8, "int8", page_size=128),
    AttentionCase(64, 2, 2, "int8"),
    AttentionCase(128, 1, 2, "float8_e4m3fn", compute="bfloat16", page_size=64),
)


@dataclass(frozen=True)
class AttentionBatch:
    """Arguments of the operation, and what its pool was filled with."""

    q_THh: jax.Array
    pool: jax.Array
    scales: jax.Array | None
    page_table_SP: jax.Array
    query_start_S1: jax.Array
    context_len_S: jax.Array
    first_page: int
    sinks_H: jax.Array | None
    layout: PageLayout
    keys: tuple[np.ndarray, ...]
    """For each sequence float32 `[length, K, h]`, before it was rounded to the pool's format."""
    values: tuple[np.ndarray, ...]

    @property
    def arguments(self) -> tuple[jax.Array | int | None, ...]:
        """The operation's positional ones."""
        return (
            self.q_THh,
            self.pool,
            self.scales,
            self.page_table_SP,
            self.query_start_S1,
            self.context_len_S,
            self.first_page,
        )


def make_batch(case: AttentionCase, seed: int = 0) -> AttentionBatch:
    """A batch of the case, its pages poisoned."""
    rng = np.random.default_rng(seed)
    layout = case.layout()
    shape = case.num_kv_heads, case.head_size
    keys, values = (
        tuple(rng.normal(size=(length, *shape)).astype(np.float32) for length in case.context_len)
        for _ in range(2)
    )
    table = _page_table(rng, case, layout)
    pool, scales = _poisoned(layout)
    position = np.concatenate([np.arange(length) for length in case.context_len])
    sequence = np.repeat(np.arange(len(case.context_len)), case.context_len)
    pool, scales = kv_write(
        pool,
        scales,
        jnp.asarray(np.concatenate(keys)),
        jnp.asarray(np.concatenate(values)),
        jnp.asarray(table[sequence, position // case.page_size] + LAYER * layout.num_pages),
        jnp.asarray(position % case.page_size, jnp.int32),
        layout=layout,
    )
    queries = rng.normal(size=(case.padded_rows, case.num_heads, case.head_size))
    return AttentionBatch(
        q_THh=jnp.asarray(queries, case.compute),
        pool=pool,
        scales=scales,
        page_table_SP=jnp.asarray(table),
        query_start_S1=jnp.asarray(np.concatenate([[0], np.cumsum(case.num_rows)]), jnp.int32),
        context_len_S=jnp.asarray(case.context_len, jnp.int32),
        first_page=LAYER * layout.num_pages,
        sinks_H=jnp.asarray(rng.normal(size=case.num_heads), jnp.float32) if case.sinks else None,
        layout=layout,
        keys=keys,
        values=values,
    )


def exact_attention(case: AttentionCase, batch: AttentionBatch, sequence: int, row: int) -> np.ndarray:
    """`[H, h]` in double precision: a row of a sequence, counted from its first of this step."""
    q_Hh = np.asarray(batch.q_THh[int(batch.query_start_S1[sequence]) + row], np.float64)
    position = case.context_len[sequence] - case.num_rows[sequence] + row
    first = max(0, position - case.window + 1) if case.window else 0
    out = np.empty(q_Hh.shape)
    for head in range(case.num_heads):
        seen = np.s_[first : position + 1, head // case.queries_per_kv]
        score = batch.keys[sequence][seen].astype(np.float64) @ q_Hh[head] * case.head_size**-0.5
        if case.softcap:
            score = case.softcap * np.tanh(score / case.softcap)
        sink = -math.inf if batch.sinks_H is None else float(batch.sinks_H[head])
        peak = max(score.max(), sink)
        weight = np.exp(score - peak)
        out[head] = weight @ batch.values[sequence][seen] / (weight.sum() + math.exp(sink - peak))
    return out


def _page_table(rng: np.random.Generator, case: AttentionCase, layout: PageLayout) -> np.ndarray:
    pages = iter(rng.permutation(np.arange(1, layout.num_pages)).tolist())
    block = case.params().context_block
    width = -(-max(case.context_len) // block) * (block // case.page_size)
    table = np.zeros((len(case.context_len), width), np.int32)
    for sequence, length in enumerate(case.context_len):
        for index in range(-(-length // case.page_size)):
            table[sequence, index] = next(pages)
    return table


def _poisoned(layout: PageLayout) -> tuple[jax.Array, jax.Array | None]:
    shape = layout.pool_shape(NUM_LAYERS)
    scales = jnp.full(layout.scales_shape(NUM_LAYERS), jnp.nan) if layout.quantised else None
    if layout.kv_format == "int8":
        return jnp.zeros(shape, jnp.int8), scales
    return layout.to_storage(jnp.full(shape, jnp.nan)), scales
