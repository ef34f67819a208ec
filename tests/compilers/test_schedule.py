"""The schedules of the kernels keep to what they were built for, JAX's own beside them."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import pytest

from benchmarks.tpu_schedule import Measured, measure_all_apart

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed"),
]

DECODE = "decode 8:1 h128"
PREFILL = "prefill 8:1 h128"
FEW_ROWS = "int8 x 8", "int8-weight-only x 8", "int8-weight-only x 8 peer"
BYTES = "fp8 x 8", "int4-128 x 8", "int4-32 x 8", "fp8 x 64"
MANY_ROWS = "int8 x 2048"
SHAPES = {
    "v5e": (DECODE, f"{DECODE} peer", *FEW_ROWS, *BYTES, PREFILL, f"{PREFILL} peer"),
    "v5p": (DECODE, f"{DECODE} peer", *FEW_ROWS, *BYTES, PREFILL, f"{PREFILL} peer"),
    "v6e": (DECODE, f"{DECODE} peer", *FEW_ROWS, *BYTES, PREFILL, f"{PREFILL} peer", MANY_ROWS),
}


@functools.cache
def schedules(chip: str) -> dict[str, Measured]:
    """Of all that is asked of a chip, in one process: to start takes as long as to compile a kernel."""
    return {one.shape: one for one in measure_all_apart(chip, SHAPES[chip])}


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_decoding_waits_for_memory_and_not_for_instructions(chip: str) -> None:
    measured, peer = (schedules(chip)[name] for name in (DECODE, f"{DECODE} peer"))
    assert measured.hbm_ratio < 0.75
    assert measured.spills == measured.fills == 0
    assert measured.bundles < peer.bundles


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_prefill_keeps_the_matrix_units_busy(chip: str) -> None:
    measured, peer = (schedules(chip)[name] for name in (PREFILL, f"{PREFILL} peer"))
    assert measured.mxu_share > 0.6
    assert operations_a_bundle(measured) > operations_a_bundle(peer)
    assert measured.spills <= (measured.bundles // 100 if chip == "v6e" else 0)
    assert measured.spills < peer.spills


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_few_rows_by_a_quantised_matrix_wait_for_its_bytes(chip: str) -> None:
    integers, widened, peer = (schedules(chip)[name] for name in FEW_ROWS)
    assert integers.hbm_ratio < 0.5
    assert widened.hbm_ratio < 0.85
    # XLA's own product of the slice is as good where it fuses the widening.
    assert widened.hbm_ratio < 1.2 * peer.hbm_ratio
    assert integers.spills == integers.fills == widened.spills == widened.fills == 0


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_fp8_and_four_bits_wait_for_their_bytes_too(chip: str) -> None:
    fp8, by_128, by_32, more_rows = (schedules(chip)[name] for name in BYTES)
    assert max(fp8.hbm_ratio, by_128.hbm_ratio) < 0.75
    assert fp8.spills == fp8.fills == by_128.spills == by_128.fills == 0
    assert by_32.hbm_ratio < 0.95
    assert more_rows.hbm_ratio < 0.9


def test_many_rows_by_a_quantised_matrix_keep_the_matrix_units_busy() -> None:
    assert schedules("v6e")[MANY_ROWS].mxu_share > 0.6


def operations_a_bundle(measured: Measured) -> float:
    return measured.operations / measured.bundles
