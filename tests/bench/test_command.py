"""`jaxserve bench` from its arguments to its exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the server extra")
pytest.importorskip("httpx", reason="needs the bench extra")

from jaxserve.bench import cells
from jaxserve.bench import run as bench_run
from jaxserve.bench.cells import digest_of_plan
from jaxserve.bench.config import BenchConfig
from jaxserve.bench.result import Result
from jaxserve.cli import main
from tests.bench.results import CELLS, CONFIG, result
from tests.fake_model import fake_limits
from tests.server.harness import PacedEngine
from tests.server.http.running import HttpServer, http_server

TOML = """
name = "small"
repeats = 2
requests = 3
[matrix]
uncached = [8]
prefix = [16]
output = [5]
concurrency = [2]
[quality]
alone = 2
[scenario.rush]
kind = "burst"
size = 2
bursts = 1
uncached = 8
output = 5
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(PacedEngine(fake_limits())) as running:
        yield running


def test_a_run_is_written_printed_drawn_and_can_be_a_reference(
    server: HttpServer, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    first, page = tmp_path / "first.json", tmp_path / "first.html"
    run = ["bench", "run", str(config), "--url", server.url]
    assert main([*run, "--json", str(first), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "8+16 -> 5, greedy, 2 at once, warm" in printed
    assert "passed alone: 2 of 2 answers are the same alone" in printed
    assert page.read_text().startswith("<!DOCTYPE html>")
    stored = json.loads(first.read_text())
    assert (stored["config"]["name"], stored["config"]["scenario"]["rush"]["kind"]) == ("small", "burst")
    assert stored["machine"]["cores"] >= 1
    assert stored["served"]["model"] == "fake"

    assert main([*run, "--reference", str(first)]) == 0
    assert "passed reference: 12 of 12 greedy answers" in capsys.readouterr().out
    assert main(["bench", "compare", str(first), str(first), "--ttft", "5", "--tpot", "1"]) == 0
    assert "of 3 cells: 3 no difference" in capsys.readouterr().out
    again = tmp_path / "again.html"
    assert main(["bench", "report", str(first), "--html", str(again)]) == 0
    assert capsys.readouterr().out == printed
    assert again.read_text() == page.read_text()


def test_answers_that_differ_are_exit_status_1(
    server: HttpServer, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "first.json"
    run = ["bench", "run", str(config), "--url", server.url]
    assert main([*run, "--json", str(path)]) == 0
    stored = json.loads(path.read_text())
    for cell in stored["cells"]:
        for repeat in cell["runs"]:
            for request in repeat["requests"]:
                request["answer"] = "0" * 16
    path.write_text(json.dumps(stored))
    assert main([*run, "--reference", str(path)]) == 1
    assert "check not passed: reference: 0 of 12" in capsys.readouterr().err


def test_a_dry_run_asks_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", str(config), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "burst          rush: 2 requests" in printed
    assert "16 requests in 2 repeats" in printed
    assert main(["bench", "run", str(config), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed


def test_two_results_are_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, seconds in zip(paths, ([1.0, 1.01], [0.2, 0.21]), strict=True):
        path.write_text(result([seconds] * len(CELLS)).to_json())
    page = tmp_path / "page.html"
    assert main(["bench", "compare", *map(str, paths), "--html", str(page)]) == 0
    assert "of 2 cells: 2 B is better" in capsys.readouterr().out
    assert "Which is better where" in page.read_text()
    other = result([[1.0, 1.01]] * len(CELLS), config_digest="other")
    paths[1].write_text(other.to_json())
    assert main(["bench", "compare", *map(str, paths)]) == 2
    assert "not comparable: the configurations differ" in capsys.readouterr().err
    assert main(["bench", "compare", *map(str, paths), "--anyway"]) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to ask: give --url of a running server, or --model"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not say which models it has"),
        (["--url", "http://127.0.0.1:1", "--serve-arguments=--x"], "they do not go with --url"),
        (["--model", "m", "--server-pid", "3"], "--server-pid is about a running server"),
        (["--model", "m", "--json", "/nonesuch/x.json"], "there is no folder /nonesuch"),
    ],
)
def test_what_is_wrong_is_a_sentence(
    config: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "run", str(config), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_a_reference_of_other_requests_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(result([[1.0]] * len(CELLS)).to_json())
    assert main(["bench", "run", str(config), "--url", "http://127.0.0.1:1", "--reference", str(path)]) == 2
    assert "its requests were others" in capsys.readouterr().err
    assert main(["bench", "compare", str(path), str(path), "--ttft", "-1"]) == 2
    assert "--ttft -1.0 is not a number of seconds above 0" in capsys.readouterr().err
    assert Result.read(path).config_digest == CONFIG.digest


def test_an_evaluation_is_read_before_the_work(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    nobody = ["bench", "run", str(config), "--url", "http://127.0.0.1:1"]
    assert main([*nobody, "--evaluation", str(path)]) == 2
    assert "report.json: not a report of `jaxserve evaluate --json`" in capsys.readouterr().err
    assert main([*nobody, "--evaluation", str(tmp_path / "nonesuch.json")]) == 2
    assert "nonesuch.json: no such file" in capsys.readouterr().err


def test_a_plan_is_named_once(
    server: HttpServer, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, again = tmp_path / "first.json", tmp_path / "again.json"
    run = ["bench", "run", str(config), "--url", server.url]
    assert main([*run, "--json", str(path)]) == 0
    names: list[str] = []

    def counted(plan: BenchConfig) -> str:
        names.append(name := digest_of_plan(plan))
        return name

    for module in (cells, bench_run):
        monkeypatch.setattr(module, "digest_of_plan", counted)
    assert main([*run, "--json", str(again), "--reference", str(path)]) == 0
    assert names == [Result.read(path).plan_digest] == [Result.read(again).plan_digest]


def test_an_evaluation_is_a_check_of_the_result(
    server: HttpServer, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    report = {"model": {"precision": "int4", "kv_format": "int8"}, "passed": True, "verdicts": [{}]}
    path.write_text(json.dumps(report))
    assert main(["bench", "run", str(config), "--url", server.url, "--evaluation", str(path)]) == 1
    assert "check not passed: evaluation: report.json is about int4, KV int8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_of_its_own_serves_tenants_and_survives_its_checkers(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shared_data / "models" / "stories260K" / "hf"
    config, path = tmp_path / "own.toml", tmp_path / "own.json"
    config.write_text(
        "repeats = 1\nrequests = 2\nquality.alone = 2\n"
        "[matrix]\nuncached = [8]\noutput = [4]\nconcurrency = [2]\n"
        "[scenario.shop]\nkind = 'tenants'\nrequests = 4\nuncached = 8\noutput = 4\n"
        "[scenario.checker]\nkind = 'failure'\n"
        "requests = 12\nrate = 4.0\nat = 2.4\nuncached = 8\noutput = 4\n"
    )
    arguments = ["--num-slots", "2", "--max-model-len", "128", "--max-chunk", "16"]
    started = ["--model", str(model), f"--serve-arguments={' '.join(arguments)}"]
    assert main(["bench", "run", str(config), *started, "--json", str(path)]) == 0, capsys.readouterr().err
    found = Result.read(path)
    assert found.served.chosen["slots"].startswith("2 sequences")
    assert "--num-slots 2" in found.served.arguments
    for cell in found.cells:
        assert all(request.answered for request in cell.runs[0].requests), cell.name
