"""Attention and the KV write together against a plain statement, pages random, unused ones poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention import AttentionParams, ragged_paged_attention

NUM_PAGES = 64
NUM_TABLE_PAGES = 32
CONTEXT_LEN = np.array([5, 130, 40, 300], np.int32)
NUM_ROWS = np.array([5, 1, 33, 1], np.int32)
PADDED_ROWS = 48
LAYER = 1


@dataclass(frozen=True)
class Case:
    head_size: int
    num_kv_heads: int
    queries_per_kv: int
    kv_format: str = "float32"
    storage: str = "float32"
    page_size: int = 16
    window: int = 0
    softcap: float = 0.0
    tolerance: float = 1e-5


CASES = [
    Case(64, 3, 3),
    Case(8, 4, 2, window=20),
    Case(128, 2, 2, window=150, softcap=30.0),
    Case(80, 1, 4, page_size=32),
    Case(256, 1, 4, "bfloat16", "uint16", tolerance=2e-2),
    Case(128, 2, 1, "bfloat16", "bfloat16", tolerance=2e-2),
    Case(96, 2, 1, "int8", "int8", tolerance=4e-2),
    Case(64, 2, 2, "int8", "int8", window=33, tolerance=4e-2),
    Case(64, 2, 2, "int8", "int8", page_size=64, tolerance=4e-2),
    Case(128, 2, 2, "int8", "int8", page_size=128, tolerance=4e-2),
]


@pytest.mark.parametrize("exact_order", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_attend_to_their_own_sequence(case: Case, exact_order: bool) -> None:
    rng = np.random.default_rng(0)
    layout = PageLayout(
        case.page_size, case.num_kv_heads, case.head_size, NUM_PAGES, case.kv_format, case.storage
    )
    keys = [rng.normal(size=(n, case.num_kv_heads, case.head_size)).astype(np.float32) for n in CONTEXT_LEN]
    values = [rng.normal(size=keys[i].shape).astype(np.float32) for i in range(len(keys))]
    table = random_page_table(rng, case.page_size)
    pool, scales = poisoned_pool(layout)
    for sequence, length in enumerate(CONTEXT_LEN):
        position = np.arange(length)
        pool, scales = kv_write(
            pool,
            scales,
            jnp.asarray(keys[sequence]),
            jnp.asarray(values[sequence]),
            jnp.asarray(table[sequence, position // case.page_size] + LAYER * NUM_PAGES),
            jnp.asarray(position % case.page_size, jnp.int32),
            layout=layout,
        )
    num_heads = case.num_kv_heads * case.queries_per_kv
    queries = rng.normal(size=(PADDED_ROWS, num_heads, case.head_size)).astype(np.float32)
    params = AttentionParams(
        scale=case.head_size**-0.5, window=case.window, softcap=case.softcap, exact_order=exact_order
    )
    start = np.concatenate([[0], np.cumsum(NUM_ROWS)]).astype(np.int32)

    def attend(q: jax.Array, starts: np.ndarray, single: bool) -> np.ndarray:
        @jax.jit
        def run(*arrays: jax.Array) -> jax.Array:
            return ragged_paged_attention(
                *arrays, LAYER * NUM_PAGES, layout=layout, params=params, single=single
            )

        return np.asarray(
            run(q, pool, scales, jnp.asarray(table), jnp.asarray(starts), jnp.asarray(CONTEXT_LEN))
        )

    out = attend(jnp.asarray(queries), start, single=False)
    assert np.isfinite(out).all()
    for sequence, length in enumerate(CONTEXT_LEN):
        for row in range(start[sequence], start[sequence + 1]):
            position = length - start[sequence + 1] + row
            expected = plain_attention(queries[row], keys[sequence], values[sequence], position, case)
            np.testing.assert_allclose(out[row], expected, atol=case.tolerance, rtol=0)
    last_rows = start[1:] - 1
    singles = attend(jnp.asarray(queries[last_rows]), np.arange(5, dtype=np.int32), single=True)
    np.testing.assert_allclose(singles, out[last_rows], atol=2e-6, rtol=0)


def plain_attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, case: Case
) -> np.ndarray:
    first = max(0, position - case.window + 1) if case.window else 0
    out = np.empty(query.shape)
    for head in range(query.shape[0]):
        kv_head = head // case.queries_per_kv
        score = keys[first : position + 1, kv_head] @ query[head] * case.head_size**-0.5
        if case.softcap:
            score = case.softcap * np.tanh(score / case.softcap)
        weight = np.exp(score - score.max())
        out[head] = weight @ values[first : position + 1, kv_head] / weight.sum()
    return out


def random_page_table(rng: np.random.Generator, page_size: int) -> np.ndarray:
    pages = iter(rng.permutation(np.arange(1, NUM_PAGES)).tolist())
    table = np.zeros((len(CONTEXT_LEN), NUM_TABLE_PAGES), np.int32)
    for sequence, length in enumerate(CONTEXT_LEN):
        for index in range(-(-length // page_size)):
            table[sequence, index] = next(pages)
    return table


def poisoned_pool(layout: PageLayout) -> tuple[jax.Array, jax.Array | None]:
    """NaN wherever the format has one, scales included: what nobody wrote must not be read."""
    shape = layout.pool_shape(num_layers=2)
    if layout.quantised:
        return jnp.zeros(shape, jnp.int8), jnp.full(layout.scales_shape(num_layers=2), jnp.nan)
    return layout.to_storage(jnp.full(shape, jnp.nan)), None


def test_shapes_that_disagree_are_named() -> None:
    layout = PageLayout(16, 2, 64, 8, "float32", "float32")
    pool = jnp.zeros(layout.pool_shape(1))
    starts = jnp.zeros((3,), jnp.int32)
    lengths = jnp.ones((2,), jnp.int32)

    def attend(heads: int, head_size: int, pages: int, block: int = 128, rows: int = 2) -> None:
        ragged_paged_attention(
            jnp.zeros((rows, heads, head_size)),
            pool,
            None,
            jnp.zeros((2, pages), jnp.int32),
            starts,
            lengths,
            0,
            layout=layout,
            params=AttentionParams(scale=1.0, context_block=block),
            single=True,
        )

    with pytest.raises(ValueError, match=r"queries \(2, 3, 64\) over 2 heads of 64"):
        attend(3, 64, 8)
    with pytest.raises(ValueError, match="context_block 128 over 7 pages of 16 tokens"):
        attend(2, 64, 7)
    with pytest.raises(ValueError, match="3 rows for 2 sequences of one row"):
        attend(2, 64, 8, rows=3)
