"""Several real processes with one device each give the answers of a single one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.converted import convert
from jaxserve.quantization import recipe_named
from jaxserve.weights import open_checkpoint
from tests.sharding.jobs import answers_of, run_job, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MEMBER = "tests.sharding.job_member"


def alone(model: Path, settings: dict[str, Any]) -> Any:
    process = start(MEMBER, [str(model), "", json.dumps(settings)])
    output, log = process.communicate()
    assert process.returncode == 0, log
    return answers_of(output)["tokens"]


@pytest.mark.parametrize(
    ("model", "mesh", "num_processes", "settings"),
    [
        ("stories260K/hf", "tensor=2", 2, {}),
        ("stories260K/hf", "auto", 2, {"quantize": "int8", "max_iterations": 4}),
        ("stories260K_moe/copies4_top2", "tensor=2,expert=2", 4, {}),
        # Five layers: the second stage has padding, of a kind that it knows from its own.
        ("stories260K/hf", "pipe=2", 2, {"max_iterations": 4}),
        ("stories260K/hf", "tensor=2,pipe=2", 4, {"quantize": "int8"}),
    ],
)
def test_processes_answer_as_one(
    shared_data: Path, model: str, mesh: str, num_processes: int, settings: dict[str, Any]
) -> None:
    folder = shared_data / "models" / model
    outputs = run_job(MEMBER, [str(folder), mesh, json.dumps(settings)], num_processes)
    assert answers_of(outputs[0])["tokens"] == alone(folder, settings)
    assert not any(outputs[1:]), "who follows says nothing"


def test_stages_of_a_converted_checkpoint(shared_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    convert(open_checkpoint(shared_data / "models/stories260K/hf"), folder, recipe=recipe_named("int8"))
    outputs = run_job(MEMBER, [str(folder), "pipe=2", "{}"], 2)
    assert answers_of(outputs[0])["tokens"] == alone(folder, {})


def test_the_command_answers_once(shared_data: Path) -> None:
    folder = shared_data / "models/stories260K/hf"
    asked = ["generate", str(folder), "--raw", "--max-tokens", "12", "--max-model-len", "64", "--json"]
    asked += ["--max-chunk", "16", "-p", "Once upon a time"]
    process = start("jaxserve", asked)
    expected = json.loads(process.communicate()[0])["token_ids"]
    first, second = run_job("jaxserve", [*asked, "--mesh", "tensor=2"], 2)
    assert json.loads(first)["token_ids"] == expected
    assert second == ""
