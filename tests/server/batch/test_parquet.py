"""Batches and answers as Parquet files."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="needs the parquet extra")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the parquet extra")

from jaxserve.cli import main  # noqa: E402
from server.batch import parquet  # noqa: E402
from server.batch.files import BatchFiles  # noqa: E402
from tests.fake_engine import FakeEngine  # noqa: E402
from tests.fake_model import FakeModel, fake_limits  # noqa: E402
from tests.server.batch.conftest import (  # noqa: E402
    GREEDY,
    Json,
    by_name,
    chat,
    comparable,
    completion,
    read_lines,
    removing_before_the_lock,
    run_over,
    write_lines,
)

LINES: list[Json] = [
    *(completion(f"c{number}", f"number {number}") for number in range(20)),
    chat("chat", "Grüße"),
    completion("bad", temperature=-1),
    completion("nowhere") | {"url": "/v1/nowhere"},
]


def write_rows(path: Path, lines: list[Json], **columns: list[Any]) -> Path:
    """Bodies as JSON texts."""
    rows = {name: [line[name] for line in lines] for name in ("custom_id", "method", "url")}
    bodies = [json.dumps(line["body"]) for line in lines]
    pq.write_table(pa.table({**rows, "body": bodies, **columns}), path)
    return path


def records_of(path: Path) -> dict[str, Json]:
    """The rows of an answer file as records, by custom_id."""
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        if row["response"] is not None:
            row["response"]["body"] = json.loads(row["response"]["body"])
    return {row["custom_id"]: row for row in rows}


def said(records: dict[str, Json]) -> dict[str, Json]:
    """What can be compared between answers to batches that differ in their bytes."""
    return {name: comparable(record | {"id": ""}) for name, record in records.items()}


@pytest.mark.parametrize("columns", [{}, {"unrelated": [datetime.date(2026, 1, 1)] * len(LINES)}])
def test_rows_are_answered_like_lines(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    run_over(write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl")
    run_over(write_rows(tmp_path / "in.parquet", LINES, **columns), tmp_path / "out.parquet")
    answers = records_of(tmp_path / "out.parquet")
    assert said(answers) == said(by_name(tmp_path / "out.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "in.parquet",
        "out.jsonl",
        "out.parquet",
    ]


def test_a_body_may_be_a_struct_in_which_null_is_absent(tmp_path: Path) -> None:
    bodies = [
        {
            "prompt": "one",
            "max_tokens": 3,
            "stop": None,
            **{k: GREEDY[k] for k in ("temperature", "ignore_eos")},
        },
        {"prompt": "two", "max_tokens": None, "stop": ["e"], "temperature": 0.0, "ignore_eos": None},
    ]
    table = pa.table(
        {
            "custom_id": ["a", "b"],
            "method": ["POST"] * 2,
            "url": ["/v1/completions"] * 2,
            "body": pa.array(bodies),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    report = run_over(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert report.num_failed == 0
    assert records_of(tmp_path / "out.parquet")["a"]["response"]["body"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("no JSON", "body is 'no JSON'; expected an object"),
        ('["a"]', "body is ['a']; expected an object"),
        (None, "body is missing"),
    ],
)
def test_a_bad_body_is_one_rows_error(tmp_path: Path, body: str | None, complaint: str) -> None:
    table = pa.table(
        {
            "custom_id": ["a"],
            "method": ["POST"],
            "url": ["/v1/completions"],
            "body": pa.array([body], pa.string()),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    run_over(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    assert by_name(tmp_path / "out.jsonl")["a"]["error"]["message"] == f"line 1: {complaint}"


@pytest.mark.parametrize("body", [r'{"prompt": "\ud800"}', r'{"prompt": "\\\ud800"}', r'{"\udfff": 1}'])
def test_half_a_surrogate_pair_is_one_rows_error_as_it_is_a_lines(tmp_path: Path, body: str) -> None:
    good = completion("good")
    line = json.dumps(good | {"custom_id": "half", "body": {}}).replace("{}", body)
    run_over(write_lines(tmp_path / "in.jsonl", [line, good]), tmp_path / "lines.jsonl")
    columns = {name: [good[name]] * 2 for name in ("method", "url")}
    table = pa.table({"custom_id": ["half", "good"], **columns, "body": [body, json.dumps(good["body"])]})
    pq.write_table(table, tmp_path / "in.parquet")
    run_over(tmp_path / "in.parquet", tmp_path / "rows.jsonl")
    lines, rows = (by_name(tmp_path / name) for name in ("lines.jsonl", "rows.jsonl"))
    assert rows[None]["error"] == lines[None]["error"]
    assert "unpaired surrogate" in rows[None]["error"]["message"]
    assert rows["good"]["response"]["status_code"] == 200


def test_a_name_of_another_type_is_one_rows_error(tmp_path: Path) -> None:
    table = pa.table(
        {"custom_id": [b"a"], "method": ["POST"], "url": ["/v1/completions"], "body": ['{"prompt": "x"}']}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    run_over(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    (record,) = read_lines(tmp_path / "out.jsonl")
    assert "custom_id is {'type': 'bytes'}; expected a string" in record["error"]["message"]


def test_a_run_that_was_broken_off_is_taken_up(tmp_path: Path) -> None:
    batch, answers = write_rows(tmp_path / "in.parquet", LINES), tmp_path / "out.parquet"
    with pytest.raises(RuntimeError, match="the device has gone"):
        run_over(batch, answers, FakeEngine(fake_limits(), fail_at=20))
    assert not answers.exists()
    kept = read_lines(tmp_path / "out.parquet.partial.jsonl")
    assert kept
    report = run_over(batch, answers)
    assert report.num_before == len(kept)
    assert len(records_of(answers)) == len(LINES)
    assert not (tmp_path / "out.parquet.partial.jsonl").exists()


def test_a_finished_file_is_taken_up_when_rows_are_added(tmp_path: Path) -> None:
    batch, answers = write_rows(tmp_path / "in.parquet", LINES), tmp_path / "out.parquet"
    run_over(batch, answers)
    first = records_of(answers)
    write_rows(batch, [*LINES, completion("late")])
    with BatchFiles(batch, answers) as files:
        assert files.num_left == 1
    report = run_over(batch, answers)
    assert report.num_before == len(LINES)
    after = records_of(answers)
    assert after.pop("late")["response"]["status_code"] == 200
    assert after == first


def test_what_another_run_has_restored_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, answers = write_rows(tmp_path / "in.parquet", LINES[:1]), tmp_path / "out.parquet"
    run_over(batch, answers)
    journal = tmp_path / "out.parquet.partial.jsonl"
    read_answers, theirs = parquet.read_answers, []

    def meanwhile(path: Path) -> Iterator[Json]:
        write_lines(journal, records := list(read_answers(path)))
        theirs.append(journal.stat().st_ino)
        yield from records

    monkeypatch.setattr(parquet, "read_answers", meanwhile)
    with BatchFiles(batch, answers) as files:
        assert files.num_left == 0
        assert theirs == [journal.stat().st_ino]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet", journal.name]


def test_a_run_that_another_has_just_finished_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, answers = write_rows(tmp_path / "in.parquet", LINES[:1]), tmp_path / "out.parquet"
    run_over(batch, answers)
    before = answers.read_bytes()
    removing_before_the_lock(tmp_path / "out.parquet.partial.jsonl", monkeypatch)
    with pytest.raises(ValueError, match=r"out\.parquet has just been written by another process"):
        BatchFiles(batch, answers)
    assert answers.read_bytes() == before
    assert not (tmp_path / "out.parquet.partial.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"custom_id": ["a"], "method": ["POST"]}, "in.parquet has no column url, body"),
        (b"no Parquet", "in.parquet: Parquet magic bytes not found"),
        (b"", "in.parquet: "),
    ],
)
def test_what_is_no_batch_is_refused(
    fake: FakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, complaint: str
) -> None:
    batch = tmp_path / "in.parquet"
    if isinstance(content, bytes):
        batch.write_bytes(content)
    else:
        pq.write_table(pa.table(content), batch)
    assert main(["batch", "fake", str(batch), str(tmp_path / "out.jsonl")]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_another_parquet_file_is_not_touched(
    fake: FakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_rows(tmp_path / "in.parquet", LINES)
    other = tmp_path / "out.parquet"
    pq.write_table(pa.table({"diary": ["dear"]}), other)
    before = other.read_bytes()
    assert main(["batch", "fake", str(batch), str(other)]) == 2
    assert "out.parquet is no answer file of a batch: it has other columns" in capsys.readouterr().err
    assert other.read_bytes() == before
