"""Attention and the KV write together against a plain statement, pages random, unused ones poisoned."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Target
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention import AttentionParams, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import (
    CASES,
    AttentionBatch,
    AttentionCase,
    exact_attention,
    make_batch,
)

FLOAT32_ERROR = 1e-5


batch_of = functools.cache(make_batch)


def attend(
    case: AttentionCase,
    batch: AttentionBatch,
    implementation: str,
    single: bool,
    num_cores: int = 1,
    **params: bool,
) -> np.ndarray:
    target = Target(
        native=implementation == "cpu",
        num_cores=num_cores,
        overrides=(("ragged_paged_attention", implementation),),
    )

    @jax.jit
    def run(*arrays: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *arrays,
            layout=batch.layout,
            params=case.params(**params),
            single=single,
            sinks_H=batch.sinks_H,
            target=target,
        )

    return np.asarray(run(*batch.arguments), np.float32)


def last_rows(case: AttentionCase, batch: AttentionBatch) -> tuple[AttentionCase, AttentionBatch]:
    """The same contexts with one row a sequence; a sequence without any is padding."""
    number = len(case.context_len)
    singles = dataclasses.replace(case, num_rows=(1,) * number, padded_rows=number)
    last = np.maximum(np.asarray(batch.query_start_S1)[1:] - 1, 0)
    starts = jnp.arange(number + 1, dtype=jnp.int32)
    return singles, dataclasses.replace(batch, q_THh=batch.q_THh[last], query_start_S1=starts)


@functools.cache
def exact_rows(case: AttentionCase) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the rows that belong to anyone, and what they should be."""
    batch, rows, expected = batch_of(case), [], []
    for sequence, num_rows in enumerate(case.num_rows):
        for row in range(num_rows):
            rows.append(int(batch.query_start_S1[sequence]) + row)
            expected.append(exact_attention(case, batch, sequence, row))
    return np.array(rows), np.stack(expected)


@functools.cache
def format_error(case: AttentionCase) -> float:
    """What the reference itself loses by the case's precision, and as much again for another order of it."""
    rows, expected = exact_rows(case)
    out = attend(case, batch_of(case), "reference", single=False)
    return 2 * float(np.abs(out[rows] - expected).max()) + FLOAT32_ERROR


def bound(case: AttentionCase) -> float:
    """Float32 is held to float32; of other formats more than a tenth would be no rounding any more."""
    if case.kv_format == case.compute == "float32":
        return FLOAT32_ERROR
    return min(format_error(case), 0.1)


def check(case: AttentionCase, implementation: str, **params: Any) -> None:
    """A mixed batch."""
    rows, expected = exact_rows(case)
    out = attend(case, batch_of(case), implementation, single=False, **params)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[rows], expected, atol=bound(case), rtol=0)


def check_single(case: AttentionCase, implementation: str, **params: Any) -> None:
    """A batch of one row a sequence."""
    rows, expected = exact_rows(case)
    singles, batch = last_rows(case, batch_of(case))
    out = attend(singles, batch, implementation, single=True, **params)
    assert np.isfinite(out).all()
    owned = np.array(case.num_rows) > 0
    last = np.cumsum(np.array(case.num_rows))[owned] - 1
    np.testing.assert_allclose(out[owned], expected[np.searchsorted(rows, last)], atol=bound(case), rtol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_attends_to_each_rows_own_sequence(case: AttentionCase) -> None:
    check(case, "reference")
    check_single(case, "reference")


@pytest.mark.parametrize("case", [case for case in CASES if case.head_size % 16 == 0], ids=str)
def test_one_row_alone_is_added_up_by_slices(case: AttentionCase) -> None:
    """Of the last sequence, of several blocks."""
    singles, batch = last_rows(case, batch_of(case))
    alone = dataclasses.replace(
        batch,
        q_THh=batch.q_THh[-1:],
        page_table_SP=batch.page_table_SP[-1:],
        query_start_S1=jnp.arange(2, dtype=jnp.int32),
        context_len_S=batch.context_len_S[-1:],
    )
    out = attend(singles, alone, "row", single=True)
    np.testing.assert_allclose(out, exact_rows(case)[1][-1:], atol=bound(case), rtol=0)


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 2, 7)], ids=str)
def test_the_reference_in_exact_order_does_the_same(case: AttentionCase) -> None:
    check(case, "reference", exact_order=True)
    check_single(case, "reference", exact_order=True)


@pytest.mark.parametrize("case", [CASES[i] for i in (2, 3, 7, 10)], ids=str)
def test_the_tpu_kernels_attend_to_a_mixed_batch(case: AttentionCase) -> None:
    check(case, "tpu")


@pytest.mark.parametrize("case", [CASES[i] for i in (4, 6, 8)], ids=str)
def test_the_tpu_kernel_attends_to_single_rows(case: AttentionCase) -> None:
    check_single(case, "tpu")


LONG = AttentionCase(
    128, 1, 4, page_size=64, sinks=True, context_len=(2600, 0, 70, 1025), num_rows=(1, 0, 1, 3), padded_rows=6
)
"""Few sequences, of which some are long."""


@pytest.mark.parametrize("changes", [{}, {"sinks": False, "kv_format": "int8", "softcap": 20.0}], ids=str)
def test_cores_of_a_tpu_share_the_contexts_of_few_sequences(changes: dict[str, Any]) -> None:
    case = dataclasses.replace(LONG, **changes)
    check(case, "tpu", num_cores=2)
    check_single(case, "tpu", num_cores=2)


ON_CPU = [
    *(case for case in CASES if case.kv_format != "float8_e4m3fn" and not case.sinks),
    # So many heads that threads share them, and contexts that they share in parts.
    AttentionCase(64, 8, 2, context_len=(5, 600, 0, 290, 513)),
    AttentionCase(32, 1, 3, "bfloat16", window=270, context_len=(600, 0, 513), num_rows=(9, 0, 33)),
    # More queries than a tile has rows, and lanes that do not fill two pairs of tiles.
    AttentionCase(80, 1, 20, "bfloat16", page_size=32, softcap=20.0),
]


@pytest.mark.parametrize("case", ON_CPU, ids=str)
def test_the_cpu_kernel_attends_to_each_rows_own_sequence(case: AttentionCase, native_kernels: None) -> None:
    check(case, "cpu")
    check_single(case, "cpu")


def test_the_cpu_kernel_caps_scores_and_leaves_sinks_to_the_reference(native_kernels: None) -> None:
    check(dataclasses.replace(CASES[2], sinks=False), "cpu")
    check(CASES[2], "cpu")


@pytest.mark.parametrize("case", ON_CPU, ids=str)
def test_a_row_of_the_cpu_kernel_is_bitwise_the_same_alone(case: AttentionCase, native_kernels: None) -> None:
    batch, rows = batch_of(case), exact_rows(case)[0]
    together = attend(case, batch, "cpu", single=False)
    singles, last = last_rows(case, batch)
    alone = attend(singles, last, "cpu", single=True)
    ends = np.cumsum(np.array(case.num_rows))
    for sequence, num_rows in enumerate(case.num_rows):
        if num_rows:
            np.testing.assert_array_equal(together[rows[ends[sequence] - 1]], alone[sequence])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the ways to multiply differ on x86 alone")
def test_the_cpu_kernel_does_without_tiles(native_kernels: None) -> None:
    chosen = "cpu_kernel and bfloat16"
    command = [sys.executable, "-m", "pytest", __file__, "-k", chosen]
    done = subprocess.run(
        command,
        env=os.environ | {"CXXFLAGS": "-mno-amx-bf16"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"{2 * sum('bfloat16' in str(case) for case in ON_CPU)} passed" in done.stdout, done.stdout


def test_a_long_page_table_makes_no_difference() -> None:
    """Beyond 256 KiB the kernels take it in pieces."""
    case = dataclasses.replace(CASES[3], page_size=64, queries_per_kv=8, padded_rows=40)
    batch = batch_of(case)
    table = jnp.pad(batch.page_table_SP, ((0, 0), (0, 16384 - batch.page_table_SP.shape[1])))
    rows, expected = exact_rows(case)
    out = attend(case, dataclasses.replace(batch, page_table_SP=table), "tpu", single=False)
    np.testing.assert_allclose(out[rows], expected, atol=FLOAT32_ERROR, rtol=0)


def test_what_a_kernel_cannot_take_is_named() -> None:
    case = CASES[5]
    with pytest.raises(ValueError, match="by tpu: pages of bfloat16 are stored as uint16"):
        attend(case, batch_of(case), "tpu", single=False)
    case = dataclasses.replace(CASES[9], storage="")
    with pytest.raises(ValueError, match="no multiple of 32"):
        attend(case, batch_of(case), "tpu", single=False)
    target = Target(overrides=(("ragged_paged_attention", "cpu"),))
    settings = {"layout": case.layout(), "params": case.params(), "single": False, "target": target}
    with pytest.raises(ValueError, match="by cpu: no kernels are built for this machine"):
        ragged_paged_attention(*batch_of(case).arguments, **settings)
    with pytest.raises(ValueError, match="no implementation 'abacus': choose from tpu, gpu, cpu, row, ref"):
        attend(case, batch_of(case), "abacus", single=False)


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
            sinks_H=jnp.zeros((heads + 1,)) if block == 256 else None,
        )

    with pytest.raises(ValueError, match=r"queries \(2, 3, 64\) over 2 heads of 64"):
        attend(3, 64, 8)
    with pytest.raises(ValueError, match="context_block 128 over 7 pages of 16 tokens"):
        attend(2, 64, 7)
    with pytest.raises(ValueError, match="3 rows for 2 sequences of one row"):
        attend(2, 64, 8, rows=3)
    with pytest.raises(ValueError, match=r"sinks \(3,\) for 2 heads"):
        attend(2, 64, 16, block=256)
