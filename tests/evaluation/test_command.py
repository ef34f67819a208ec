"""`jaxserve evaluate` over a small real model, from files to exit status."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.cli import main
from jaxserve.evaluation import MEASURES
from tests.cli.conftest import run_cli
from tests.oracle.tiny_models import write_tiny_model

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 8
SMALL = ["--max-chunk", "4", "--slots", "4", "--context", "64", "--max-model-len", "256"]


@dataclass(frozen=True)
class Inputs:
    """A model, and files to measure it on."""

    model: str
    text: str
    prompts: str
    folder: Path

    def run(self, *arguments: str) -> int:
        return main(["evaluate", self.model, *SMALL, *arguments])


@pytest.fixture
def inputs(shared_data: Path, tmp_path: Path) -> Inputs:
    text, prompts = tmp_path / "story.txt", tmp_path / "ask.jsonl"
    text.write_text(STORY)
    lines: list[dict[str, Any]] = [
        {"prompt": "Once upon a time", "answer": "never said"},
        {
            "prompt": "One day, Tom",
            "slice": "rules",
            "instruction_id_list": ["punctuation:no_comma", "language:response_language"],
            "kwargs": [{}, {"language": "en"}],
        },
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Inputs(str(shared_data / "models" / "stories260K" / "hf"), str(text), str(prompts), tmp_path)


def test_int8_pages_against_float32(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    report_file = inputs.folder / "report.json"
    status = inputs.run(
        *["--kv-format", "int8", "--text", inputs.text, "--prompts", inputs.prompts],
        *["--needle", "120", "--needle-depths", "2", "--answer-tokens", "12", "--json", str(report_file)],
        *["--floor", "perplexity=1.02", "--floor", "kl=0.02", "--floor", "top1=0.8"],
    )
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    assert "passed: 3 of 3 floors hold" in captured.out
    assert "not judged: language:response_language (1)" in captured.out
    report = json.loads(report_file.read_text())
    assert [part["name"] for part in report["slices"]] == ["text/story", "ask", "ask/rules", "needle/120"]
    text, _, rules, _ = (part["measures"] for part in report["slices"])
    assert text["kl"]["value"] > 0  # The two sides are not one.
    assert text["perplexity"]["model"] == pytest.approx(text["perplexity"]["reference"], rel=0.02)
    assert rules["instructions"]["value"] in {0.0, 1.0}
    assert len(report["needle_grid"]) == 2
    assert [pair["source"] for pair in report["answers"][:2]] == [f"{inputs.prompts}:{n}" for n in (1, 2)]
    assert all(pair["model"] and pair["reference"] for pair in report["answers"])
    model, reference = report["model"], report["reference"]
    assert (model["kv_format"], reference["kv_format"]) == ("int8", "float32")
    assert model["weight_bytes"] == reference["weight_bytes"] > 0
    assert model["kv_bytes_per_token"] < reference["kv_bytes_per_token"] / 3
    for side in (model, reference):
        assert side["scored_tokens_per_second"] > 0
        assert side["answered_tokens_per_second"] > 0


def test_a_damaged_model_misses_its_floors(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = inputs.folder / "damaged"
    shutil.copytree(inputs.model, damaged, copy_function=shutil.copyfile)
    weights, rng = load_file(damaged / "model.safetensors"), np.random.default_rng(0)
    noisy = {
        name: weight + (0.5 * weight.std() * rng.standard_normal(weight.shape)).astype(weight.dtype)
        for name, weight in weights.items()
    }
    save_file(noisy, damaged / "model.safetensors", {"format": "pt"})
    arguments = ["--text", inputs.text, "--floor", "kl=0.02", "--floor", "text/story:perplexity=1.015"]
    assert main(["evaluate", str(damaged), "--against", inputs.model, *SMALL, *arguments]) == 1
    captured = capsys.readouterr()
    assert "FAILED: 0 of 2 floors hold" in captured.out
    assert "floor missed: kl of text/story is" in captured.err
    assert "floor missed: perplexity of text/story is" in captured.err
    assert inputs.run("--text", inputs.text, "--floor", "kl=0", "--floor", "top1=1") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to measure"),
        (["--text", "TEXT", "--floor", "speed=1"], "floor 'speed=1' is not"),
        (["--text", "TEXT", "--floor", "exact=1"], "floor exact=1: nothing measures that"),
        (["--text", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--text", "EMPTY"], "empty.txt: the text is empty"),
        (["--text", "TEXT", "TEXT"], "another text has the name story"),
        (["--text", "TEXT", "--context", "100000"], "max_model_len 100000"),
        (["--text", "TEXT", "--context", "1"], "context 1 leaves no token"),
        (["--text", "TEXT", "--max-tokens", "0"], "--max-tokens 0 is below 1"),
        (["--text", "TEXT", "--json", "nowhere/report.json"], "there is no folder nowhere"),
        (["--prompts", "BROKEN"], "broken.jsonl:2: "),
        (["--needle", "3"], "a needle in 3 tokens"),
        (["--needle", "300"], "needle/300 at 0%: a prompt of"),
        (["--text", "TEXT", "--against", "OTHER"], "has a vocabulary of 512 tokens and"),
    ],
)
def test_bad_input_is_named(
    inputs: Inputs, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    empty, broken = inputs.folder / "empty.txt", inputs.folder / "broken.jsonl"
    empty.write_text(" \n")
    broken.write_text('{"prompt": "a"}\n{"prompt": \n')
    files = {"TEXT": inputs.text, "EMPTY": str(empty), "BROKEN": str(broken)}
    if "OTHER" in arguments:
        other = write_tiny_model("llama_mha", inputs.folder / "other")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(Path(inputs.model) / name, other / name)
        files["OTHER"] = str(other)
    assert inputs.run(*(files.get(argument, argument) for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxserve evaluate: error: ")
    assert message in captured.err
    assert captured.out == ""


def test_schemas_are_judged(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonschema", reason="needs the evaluate extra")
    schemas = inputs.folder / "schemas.jsonl"
    schemas.write_text('{"prompt": "Once", "schema": {"type": "object"}}\n')
    arguments = ["--prompts", str(schemas), "--answer-tokens", "4", "--floor", "schema=0.5"]
    assert inputs.run(*arguments) == 1  # A teller of stories writes no JSON.
    assert (
        "floor missed: schema of schemas is 0, at least 0.5 asked: missed by 0.5" in capsys.readouterr().err
    )


def test_the_help_explains_every_floor() -> None:
    result = run_cli("evaluate", "--help")
    assert result.returncode == 0
    epilog = " ".join(result.stdout.replace("-\n", "-").split()).partition("SLICE:MEASURE=VALUE")[2]
    at_most, _, at_least = epilog.partition("At least")
    for measure, (sense, _) in MEASURES.items():
        words = {word.strip(",.") for word in (at_most if sense == "at most" else at_least).split()}
        assert measure in words
