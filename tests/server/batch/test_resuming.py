"""A run that was broken off, wherever that was: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from server.batch.files import BatchFiles
from tests.conftest import REPOSITORY
from tests.fake_engine import FakeEngine
from tests.fake_model import FakeModel, fake_limits
from tests.server.batch.conftest import (
    Json,
    Run,
    by_name,
    chat,
    comparable,
    completion,
    read_lines,
    removing_before_the_lock,
    run_over,
    write_lines,
)

MIXED: list[Json | str] = [
    completion("a", ["one", "two"], n=2),
    "{ no line",
    chat("b", "Ünïcödé 😀"),
    completion("c", temperature=-1),
    completion("sampled", temperature=1.0),
    completion("a"),
    completion("d", "last"),
]


def answers_of(path: Path) -> dict[str, Json]:
    """Records by id, of which there is one for every line."""
    records = read_lines(path)
    named = {record["id"]: comparable(record) for record in records}
    assert len(named) == len(records)
    return named


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A batch, and the answers of one run over it."""
    folder = tmp_path_factory.mktemp("finished")
    batch = write_lines(folder / "in.jsonl", MIXED)
    run_over(batch, folder / "out.jsonl")
    return batch, (folder / "out.jsonl").read_bytes()


@given(st.integers(0, 2**20))
@hypothesis_settings(max_examples=60)
def test_a_file_cut_off_anywhere_is_taken_up(
    finished: tuple[Path, bytes], tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    batch, whole = finished
    left = whole[: cut % (len(whole) + 1)]
    answers = tmp_path_factory.mktemp("cut") / "out.jsonl"
    answers.write_bytes(left)
    report = run_over(batch, answers)
    kept = left[: left.rfind(b"\n") + 1]
    assert answers.read_bytes().startswith(kept)
    assert report.num_before == kept.count(b"\n")
    assert report.num_failed == 3
    expected = answers.with_name("whole.jsonl")
    expected.write_bytes(whole)
    assert answers_of(answers) == answers_of(expected)


def test_a_finished_batch_is_left_as_it_is(
    run: Run, fake: FakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(MIXED) == 3
    before = (tmp_path / "out.jsonl").read_bytes()
    fake.options = None
    assert run() == 3
    assert fake.options is None, "no model is loaded where nothing is to be done"
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert "4 answers, 3 errors; nothing was left to do" in capsys.readouterr().out


def test_lines_may_be_added_to_a_batch(run: Run, tmp_path: Path) -> None:
    assert run([completion("a")]) == 0
    first = (tmp_path / "out.jsonl").read_bytes()
    assert run([completion("a"), completion("b"), completion("a")]) == 3
    assert (tmp_path / "out.jsonl").read_bytes().startswith(first)
    assert by_name(tmp_path / "out.jsonl").keys() == {"a", "b", None}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: [completion("z"), *lines[1:]], "line 1 said something else when it was answered"),
        (lambda lines: ["", *lines], "line 2 said something else"),
        (lambda lines: lines[:2], "it has 3 answers, and 2 of them are to its 2 lines"),
        (lambda lines: [], "it has 3 answers, and 0 of them are to its 0 lines"),
    ],
)
def test_answers_to_another_batch_are_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], change, complaint: str
) -> None:
    lines = [completion(name) for name in "abc"]
    assert run(lines) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    capsys.readouterr()
    assert run(change(lines)) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxserve batch: error: ")
    assert complaint in error
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("my diary\n", "out.jsonl:1: Expecting value"),
        ("my diary", "out.jsonl:1: it is no record of a batch"),
        ('{"id": 1}\n', "out.jsonl:1: it is no record of a batch"),
        (
            '{"id": "batch_req_x", "custom_id": "a", "response": null, "error": null}\n',
            "its id is 'batch_req_x', which `jaxserve batch` has not written",
        ),
        ("\n", "out.jsonl:1: Expecting value"),
    ],
)
def test_somebody_elses_file_is_not_touched(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, complaint: str
) -> None:
    (tmp_path / "out.jsonl").write_text(content)
    assert run([completion("a")]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert (tmp_path / "out.jsonl").read_text() == content


def test_an_answer_that_is_there_twice_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([completion("a")]) == 0
    record = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(record * 2)
    assert run() == 2
    assert "out.jsonl:2: line 1 of the batch is answered twice" in capsys.readouterr().err


def test_the_batch_is_not_written_over(
    fake: FakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxserve.cli import main

    batch = write_lines(tmp_path / "in.jsonl", [completion("a")])
    assert main(["batch", "fake", str(batch), str(batch)]) == 2
    assert "is the batch itself" in capsys.readouterr().err
    assert read_lines(batch) == [completion("a")]


def test_two_runs_cannot_write_the_same_answers(tmp_path: Path) -> None:
    batch = write_lines(tmp_path / "in.jsonl", [completion("a")])
    busy = pytest.raises(ValueError, match=r"out\.jsonl is being written by another process")
    with BatchFiles(batch, tmp_path / "out.jsonl"), busy:
        BatchFiles(batch, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists(), "no answer, no file"
    run_over(batch, tmp_path / "out.jsonl")


def test_an_empty_file_is_removed_before_another_run_can_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, answers = write_lines(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "out.jsonl"
    files = BatchFiles(batch, answers)
    unlink = Path.unlink

    def meanwhile(path: Path) -> None:
        with pytest.raises(ValueError, match="is being written by another process"):
            BatchFiles(batch, path)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", meanwhile)
    files.close()
    assert not answers.exists()


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, answers = write_lines(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "out.jsonl"
    removing_before_the_lock(answers, monkeypatch)
    run_over(batch, answers)
    assert by_name(answers).keys() == {"a"}


def test_what_was_answered_before_the_device_failed_is_kept(tmp_path: Path) -> None:
    lines = [completion(f"c{number}") for number in range(40)]
    batch, answers = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="the device has gone"):
        run_over(batch, answers, FakeEngine(fake_limits(), fail_at=20))
    kept = read_lines(answers)
    assert 0 < len(kept) < 40
    report = run_over(batch, answers)
    assert report.num_before == len(kept)
    assert by_name(answers).keys() == {line["custom_id"] for line in lines}


def test_a_line_that_cannot_be_looked_at_now_is_left_for_the_next_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance", reason="needs the server extra")
    lines = [completion("bad", temperature=-1), completion("form", guided_regex="[ab]{3}", ignore_eos=False)]
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nonesuch")  # No process to check a grammar in can be started.
        assert run(lines) == 2
    error = capsys.readouterr().err
    assert "grammar regex: no process to check it in" in error
    assert error.endswith("1 of 2 lines have answers; the same command goes on\n")
    assert by_name(tmp_path / "out.jsonl").keys() == {"bad"}
    assert run(lines) == 3
    assert by_name(tmp_path / "out.jsonl")["form"]["response"]["status_code"] == 200


@contextmanager
def running(batch: Path, answers: Path, *num_steps: int) -> Iterator[subprocess.Popen[str]]:
    """`tests.server.batch.fake_batch` on these files, which cannot end soon after `num_steps` steps."""
    arguments = [str(batch), str(answers), *map(str, num_steps)]
    command = [sys.executable, "-m", "tests.server.batch.fake_batch", *arguments]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_lines(path: Path, num_lines: int) -> None:
    limit = time.monotonic() + 200
    while not path.exists() or path.read_bytes().count(b"\n") < num_lines:
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)


def test_a_killed_process_is_taken_up(tmp_path: Path) -> None:
    lines = [
        completion(f"c{number}", f"{'alike ' * (number % 2)}{number}", temperature=number % 3 / 2)
        for number in range(150)
    ]
    batch, answers = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run_over(batch, tmp_path / "at once.jsonl")
    for num_lines in (20, 70):
        with running(batch, answers, 100) as process:
            wait_for_lines(answers, num_lines)
            process.send_signal(signal.SIGKILL)
            assert process.wait(100) == -signal.SIGKILL
        assert answers.read_bytes().count(b"\n") < len(lines)
    with answers.open("ab") as file:  # As a process leaves a line that was killed while it wrote it.
        file.write(b'{"id": "batch_req_3')
    with running(batch, answers) as process:
        assert process.wait(200) == 0
    assert by_name(answers).keys() == {line["custom_id"] for line in lines}
    assert answers_of(answers) == answers_of(tmp_path / "at once.jsonl")


def test_ctrl_c_leaves_whole_lines_and_says_how_to_go_on(tmp_path: Path) -> None:
    lines = [completion(f"c{number}", max_tokens=20) for number in range(150)]
    batch, answers = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with running(batch, answers, 100) as process:
        wait_for_lines(answers, 10)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=200)
    assert process.returncode == 130
    num_kept = len(read_lines(answers))
    assert told == f"{num_kept} of 150 lines have answers; the same command goes on\n"
    assert 10 <= num_kept < 150
    report = run_over(batch, answers)
    assert (report.num_before, report.num_failed) == (num_kept, 0)
    assert by_name(answers).keys() == {line["custom_id"] for line in lines}
    assert json.dumps(read_lines(answers)[0])
