"""What `benchmarks.scaling` measures and models, held to figures that are worked out here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.communication import share_of, shares
from benchmarks.scaling import DENSE, measure, meshes
from jaxserve.engine.machines import Machine
from jaxserve.planning.models import find_model
from tests.sharding.eight import NOT_OPTIMISED

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, SLOTS = 64, 8
TINY = dataclasses.replace(
    DENSE, vocab_size=256, hidden_size=HIDDEN, intermediate_size=64, num_heads=4, num_kv_heads=2, head_size=16
)


def main() -> None:
    """Run by the test in a process with several devices."""
    told = {
        f"{mesh}, {number} layers, {groups} groups": measure(
            dataclasses.replace(TINY, layers=DENSE.layers[:number]), mesh, groups, SLOTS
        )
        for mesh, number, groups in (
            ("tensor=2", 1, 1),
            ("tensor=2", 3, 1),
            ("pipe=2", 2, 1),
            ("pipe=2", 2, 2),
            ("data=2", 1, 1),
        )
    }
    print(json.dumps(told))


@pytest.fixture(scope="module")
def measured() -> Any:
    process = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.test_scaling"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | NOT_OPTIMISED,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout)


def test_steps_are_timed_and_their_exchanges_counted(measured: Any) -> None:
    one, three = measured["tensor=2, 1 layers, 1 groups"], measured["tensor=2, 3 layers, 1 groups"]
    for step, rows in (("decode", SLOTS), ("prefill", 128)):
        # A layer has two sums of float32 hidden states; by a ring of two a device sends as much as there is.
        assert three[step]["exchanges"] - one[step]["exchanges"] == 2 * 2
        assert three[step]["sent_bytes"] - one[step]["sent_bytes"] == 2 * 2 * rows * HIDDEN * 4
        assert three[step]["tokens_per_second"] == pytest.approx(rows / three[step]["seconds"])
        assert 0 < three[step]["seconds"] < 60
    assert three["compile_seconds"] > 0
    assert three["devices"] == measured["pipe=2, 2 layers, 1 groups"]["devices"] == 2


def test_a_stage_hands_on_every_part_of_a_prompt(measured: Any) -> None:
    stages, groups = (measured[f"pipe=2, 2 layers, {number} groups"] for number in (1, 2))
    # One part and two ticks in the one, four parts and five ticks in the other; the last hands nothing on.
    assert stages["prefill"]["exchanges"] - stages["decode"]["exchanges"] == 4 - 1
    # A group hands on half of the rows; all of them have moved on when two have.
    assert groups["decode"]["tokens_per_second"] == pytest.approx(SLOTS / groups["decode"]["seconds"])
    assert groups["decode"]["sent_bytes"] < stages["decode"]["sent_bytes"]


def test_replicas_have_a_prompt_each_and_say_nothing(measured: Any) -> None:
    replicas = measured["data=2, 1 layers, 1 groups"]
    for step, rows in (("decode", SLOTS), ("prefill", 2 * 128)):
        assert replicas[step]["exchanges"] == 0
        assert replicas[step]["tokens_per_second"] == pytest.approx(rows / replicas[step]["seconds"])


def test_a_device_alone_is_measured_once() -> None:
    assert meshes(("tensor", "pipe"), [1, 2, 8]) == ["tensor=1", "tensor=2", "tensor=8", "pipe=2", "pipe=8"]
    assert meshes(("expert",), [4]) == ["expert=4"]


def step(*, rows: int, decode: bool, sequences: int = 1) -> dict[str, Any]:
    shape = {"rows": rows, "sequences": sequences, "logit_rows": sequences, "decode": decode}
    return {"shape": shape, "num_exchanges": 160, "sent_bytes": 3 * 10**8}


def test_the_modelled_share_is_bytes_by_bandwidth_beside_the_roofline() -> None:
    share = share_of(
        find_model("llama-3.1-70b"), Machine.parse("v6e-8"), "tensor=8", step(rows=1, decode=True)
    )
    # 400 GB/s one way over four links; a ring uses two, at 75 %.
    assert share.wire_seconds == pytest.approx(3e8 / (200e9 * 0.75))
    assert share.waiting_seconds == pytest.approx(160 * 4e-6)
    # 68.4e9 weights in the layers and 1.05e9 in the head, two bytes each, read once by eight chips; 0.1 ms.
    read = (68.4e9 + 1.05e9) * 2 / 8 / (1600e9 * 0.75)
    assert share.other_seconds == pytest.approx(read + 1e-4, rel=0.01)
    assert share.least == pytest.approx(2e-3 / (2e-3 + read + 1e-4), rel=0.01)
    assert share.most > share.least


def test_a_tick_is_of_half_of_the_layers_and_a_prompt_waits_for_stages_at_both_ends() -> None:
    model = find_model("llama-3.1-70b")
    for decode, rows, ratio in ((True, 1, 1 / 2), (False, 2048, 5 / 8)):
        told = step(rows=rows, decode=decode)
        alone = share_of(model, Machine.parse("v5e-8"), "tensor=8", told)
        staged = share_of(model, Machine.parse("v5e-16"), "tensor=8,pipe=2", told)
        assert staged.other_seconds / alone.other_seconds == pytest.approx(ratio, rel=0.01)


def test_all_compiled_machines_have_a_share() -> None:
    told = list(shares())
    assert {row["target"] for row in told} == {"v5e-16", "v6e-8", "v5p-4", "h200-8"}
    assert all(0 < row["least"] < row["most"] < 1 for row in told)


if __name__ == "__main__":
    main()
