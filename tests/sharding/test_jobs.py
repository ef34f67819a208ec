"""Several real processes with one device each give the answers of a single one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxserve.converted import convert
from jaxserve.quantization import recipe_named
from jaxserve.weights import open_checkpoint
from tests.sharding.jobs import WAIT, answers_of, job, run_job, start
from tests.weights.quantised_models import CASES, quantise_folder

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
        ("stories260K/hf", "pipe=2", 2, {"max_iterations": 4, "host_kv_memory": 2**20}),
        ("stories260K/hf", "tensor=2,pipe=2", 4, {"quantize": "int8"}),
        # Each has a replica, and a loop of iterations that ends when its own sequences have.
        ("stories260K/hf", "data=2", 2, {"num_slots": 4, "max_iterations": 4, "speculative": "ngram"}),
        # An expert in each.
        ("stories260K_moe/copies4_top2", "data=2,tensor=2", 4, {"max_iterations": 4}),
    ],
)
def test_processes_answer_as_one(
    shared_data: Path, model: str, mesh: str, num_processes: int, settings: dict[str, Any]
) -> None:
    folder = shared_data / "models" / model
    outputs = run_job(MEMBER, [str(folder), mesh, json.dumps(settings)], num_processes)
    assert answers_of(outputs[0])["tokens"] == alone(folder, settings)
    assert not any(outputs[1:]), "who follows says nothing"


def test_pages_come_to_the_leader_and_go_back(shared_data: Path) -> None:
    arguments = [str(shared_data / "models/stories260K/hf"), "tensor=2", "int8"]
    first, second = run_job("tests.sharding.page_member", arguments, 2)
    assert answers_of(first) == [True, True]
    assert second == ""


@pytest.mark.parametrize("form", ["converted", "stored"])
def test_stages_of_weights_that_are_quantised_already(shared_data: Path, tmp_path: Path, form: str) -> None:
    source, folder = shared_data / "models/stories260K/hf", tmp_path / form
    if form == "converted":
        convert(open_checkpoint(source), folder, recipe=recipe_named("int8"))
    else:
        quantise_folder(source, tmp_path, CASES["fp8 channels"])
    outputs = run_job(MEMBER, [str(folder), "pipe=2", "{}"], 2)
    assert answers_of(outputs[0])["tokens"] == alone(folder, {})


def test_the_command_answers_once(shared_data: Path) -> None:
    folder = shared_data / "models/stories260K/hf"
    asked = ["generate", str(folder), "--raw", "--max-tokens", "12", "--max-model-len", "64", "--json"]
    asked += ["--max-chunk", "16", "-p", "Once upon a time"]
    process = start("jaxserve", asked)
    expected = json.loads(process.communicate()[0])["token_ids"]
    first, second = run_job("jaxserve", [*asked, "--mesh", "data=2"], 2)
    assert json.loads(first)["token_ids"] == expected
    assert second == ""


def test_several_routes_are_refused_by_all(shared_data: Path) -> None:
    folder = shared_data / "models/stories260K/hf"
    asked = ["serve", "--route", f"one={folder}", "--route", f"other={folder}", "--mesh", "tensor=2"]
    with job("jaxserve", asked, 2) as members:
        for member in members:
            _, log = member.communicate(timeout=WAIT)
            assert member.returncode == 2
            assert "2 routes with 2 processes: they serve one" in log


def test_a_conversation_is_held_by_the_first(shared_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(shared_data / "models/stories260K/hf", folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    said = tmp_path / "said.txt"
    said.write_text("Once upon a time\nThe cat\n/exit\n")
    asked = ["chat", str(folder), "--temperature", "0", "--max-tokens", "8", "--max-model-len", "64"]
    asked += ["--max-chunk", "16"]
    with said.open() as lines:
        process = start("jaxserve", asked, stdin=lines)
        expected, log = process.communicate()
        assert process.returncode == 0, log
    assert len(expected.splitlines()) >= 2
    with said.open() as lines:
        assert run_job("jaxserve", [*asked, "--mesh", "pipe=2"], 2, lines) == [expected, ""]


def test_a_batch_is_answered_by_the_first(shared_data: Path, tmp_path: Path) -> None:
    batch = tmp_path / "batch.jsonl"
    bodies = [{"model": "m", "prompt": prompt, "max_tokens": 8} for prompt in ("Once upon", "The cat", "Tom")]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    batch.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def asked(name: str) -> list[str]:
        sizes = ["--num-slots", "2", "--max-model-len", "64", "--max-chunk", "16"]
        files = [str(batch), str(tmp_path / name)]
        return ["batch", str(shared_data / "models/stories260K/hf"), *files, "--name", "m", *sizes]

    def answers(name: str) -> dict[str, Any]:
        records = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return {record["custom_id"]: record["response"]["body"]["choices"] for record in records}

    process = start("jaxserve", asked("alone.jsonl"), stdin=subprocess.DEVNULL)
    _, log = process.communicate()
    assert process.returncode == 0, log
    first, second = run_job("jaxserve", [*asked("spread.jsonl"), "--mesh", "tensor=2"], 2)
    assert answers("spread.jsonl") == answers("alone.jsonl")
    assert sorted(answers("alone.jsonl")) == ["0", "1", "2"]
    assert "3 answers, 0 errors" in first
    assert second == ""
    # Where nothing is left to do, nobody waits for the others to do it.
    first, second = run_job("jaxserve", [*asked("spread.jsonl"), "--mesh", "tensor=2"], 2)
    assert "nothing was left to do" in first
    assert second == ""
