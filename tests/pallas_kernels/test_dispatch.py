"""The order of a table's implementations: what goes before it, what it rests on, and that it is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from pallas_kernels.dispatch import Implementation, Target, choose
from pallas_kernels.kv_write import api as kv_write
from pallas_kernels.quantised_matmul.api import IMPLEMENTATIONS
from pallas_kernels.ragged_paged_attention import api as attention

REPOSITORY = Path(__file__).resolve().parents[2]


def nothing() -> None:
    """What these implementations would do."""


def slow(rows: int, **_: object) -> str | None:
    return "XLA is faster by more than 8 rows" if rows > 8 else None


TABLE = (
    Implementation("kernel", "tpu", nothing, outdone=slow, evidence="results.json"),
    Implementation("xla", None, nothing),
)


def test_what_is_faster_further_down_is_taken_unless_a_name_goes_before_it() -> None:
    tpu = Target("tpu")
    assert choose("order", TABLE, tpu, rows=8)[0].name == "kernel"
    assert choose("order", TABLE, tpu, rows=9)[0].name == "xla"
    assert choose("order", TABLE, Target("tpu", overrides=(("order", "kernel"),)), rows=9)[0].name == "kernel"
    assert choose("order", TABLE, Target("tpu", overrides=(("order", "xla"),)), rows=8)[0].name == "xla"
    assert choose("order", TABLE, Target("gpu"), rows=8)[0].name == "xla"


def test_a_choice_is_told_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pallas_kernels.dispatch"):
        for rows in (8, 8, 9):
            choose("telling", TABLE, Target("tpu", "TPU v6"), rows=rows)
    assert [record.getMessage() for record in caplog.records] == [
        "telling by kernel on TPU v6 (measured in results.json)",
        "telling by xla on TPU v6 (not kernel: XLA is faster by more than 8 rows)",
    ]


def test_the_order_on_tpu_is_that_of_the_stored_schedules() -> None:
    (tpu,) = (entry for entry in IMPLEMENTATIONS if entry.name == "tpu")
    stored = json.loads((REPOSITORY / tpu.evidence).read_text())["measured"]
    ratios = {(line["chip"], line["shape"]): line["hbm_ratio"] for line in stored}
    peers = {key: ratio for key, ratio in ratios.items() if key[1].endswith(" peer")}
    assert len(peers) >= 6
    for (chip, shape), ratio in peers.items():
        assert ratios[chip, shape.removesuffix(" peer")] <= ratio, (chip, shape)


def test_four_bits_are_the_kernels_on_gpu_since_xla_writes_them_out_widened() -> None:
    stored = json.loads((REPOSITORY / "benchmarks/results/gpu-check-compiled.json").read_text())["compiled"]
    temporaries = {line["name"]: line["temporaries"] for line in stored}
    widened_bytes = 2 * 8192 * 28672
    for rows in ("few rows", "many rows"):
        names = [name for name in temporaries if name.startswith(f"{rows} of bfloat16 times uint4x2")]
        for name in names:
            by_xla = name.endswith(" of xla")
            assert (temporaries[name] >= widened_bytes) == by_xla, name
        assert len(names) >= 2
    (gpu,) = (entry for entry in IMPLEMENTATIONS if entry.name == "gpu")
    many = {"rows": ((2048, 8192), "bfloat16"), "num_groups": 64, "has_zeros": False}
    assert gpu.outdone(**many, values=((1, 28672, 4096), "uint8")) is None
    assert gpu.outdone(**many, values=((1, 28672, 8192), "int8")) is not None


def test_attention_and_the_write_of_its_keys_go_before_what_the_stored_schedules_hold_beside_them() -> None:
    for table in (attention.IMPLEMENTATIONS, kv_write.IMPLEMENTATIONS):
        assert table[0].name == "tpu"
        assert table[0].evidence == "benchmarks/results/tpu-schedule-attention.json"
    stored = json.loads((REPOSITORY / attention.IMPLEMENTATIONS[0].evidence).read_text())["measured"]
    lines = {(line["chip"], line["shape"]): line for line in stored}
    peers = [key for key in lines if key[1].endswith(" peer")]
    assert len(peers) == 3 * 5
    for chip, shape in peers:
        ours, peer = lines[chip, shape.removesuffix(" peer")], lines[chip, shape]
        # Of a prompt the peer's iteration does more.
        per = "operations" if shape.startswith("prefill") else "page_bytes"
        assert ours[per] / ours["bundles"] > peer[per] / peer["bundles"], (chip, shape)
