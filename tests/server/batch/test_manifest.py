"""A batch writes down what it was answered with, and a run that takes it up is held to that."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.run_manifest import RunManifest
from tests.fake_model import FakeModel
from tests.server.batch.conftest import Run, by_name, completion, read_lines, write_lines


def test_answers_bear_the_hash_of_the_manifest_beside_them(run: Run, tmp_path: Path) -> None:
    assert run([completion("a")]) == 0
    manifest = RunManifest.read(tmp_path / "out.jsonl.manifest.json")
    assert manifest.entries["batch"] == {"name": "fake", "seed": 0, "tool_parser": "auto"}
    (record,) = read_lines(tmp_path / "out.jsonl")
    assert record["response"]["body"]["system_fingerprint"] == manifest.digest


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--seed", "5"], "batch.seed is 5 and was 0"),
        (["--name", "other"], 'batch.name is "other" and was "fake"'),
        (["--tool-parser", "none"], 'batch.tool_parser is "none" and was "auto"'),
        (["--generation-config", "none"], "sampling.defaults is {} and was absent"),
    ],
)
def test_a_run_with_other_answers_is_refused(
    run: Run,
    fake: FakeModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    fake.sampling_defaults = {"temperature": 0.5}
    assert run([completion("a")]) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    capsys.readouterr()
    fake.options = None
    assert run([completion("a"), completion("b")], *arguments) == 2
    assert fake.options is None, "no weights are read for that"
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run([completion("a"), completion("b")]) == 0


def test_a_run_that_is_only_faster_goes_on(run: Run, tmp_path: Path) -> None:
    assert run([completion("a")], "--num-slots", "2") == 0
    assert run([completion("a"), completion("b")], "--num-slots", "8") == 0
    first, second = (
        by_name(tmp_path / "out.jsonl")[name]["response"]["body"]["system_fingerprint"] for name in "ab"
    )
    manifests = {
        path.name: RunManifest.read(path) for path in tmp_path.iterdir() if ".manifest." in path.name
    }
    beside = f"out.jsonl.manifest.{second}.json"
    assert manifests.keys() == {"out.jsonl.manifest.json", beside}
    assert first != second
    assert manifests["out.jsonl.manifest.json"].digest == first
    assert manifests[beside].digest == second


@pytest.mark.parametrize("content", ["my diary", '{"my": "diary"}', ""])
def test_a_file_that_is_no_manifest_is_not_written_over(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    diary = tmp_path / "diary.json"
    diary.write_text(content)
    assert run([completion("a")], "--manifest", str(diary)) == 2
    error = capsys.readouterr().err
    assert "diary.json is no manifest, and is not written over" in error
    assert error.count("\n") == 1
    assert diary.read_text() == content
    assert not (tmp_path / "out.jsonl").exists()


def test_without_answers_a_manifest_is_written_anew(run: Run, tmp_path: Path) -> None:
    assert run([completion("a")], "--seed", "1") == 0
    (tmp_path / "out.jsonl").unlink()
    assert run([completion("a")], "--seed", "2") == 0
    assert RunManifest.read(tmp_path / "out.jsonl.manifest.json").entries["batch"]["seed"] == 2


def test_the_manifest_may_lie_elsewhere(run: Run, tmp_path: Path) -> None:
    assert run([completion("a")], "--manifest", str(tmp_path / "m.json")) == 0
    assert RunManifest.read(tmp_path / "m.json").entries["engine"]["num_slots"] == 32
    assert not (tmp_path / "out.jsonl.manifest.json").exists()


def test_a_manifest_without_a_folder_is_refused_before_the_model_is_read(
    run: Run, fake: FakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([completion("a")], "--manifest", str(tmp_path / "nonesuch" / "m.json")) == 2
    assert f"m.json: there is no folder {tmp_path / 'nonesuch'}" in capsys.readouterr().err
    assert fake.options is None


def test_a_bad_number_of_lines_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "in.jsonl", [completion("a")])
    assert run(None, "--read-ahead", "0") == 2
    assert "--read-ahead 0 is below 1" in capsys.readouterr().err
