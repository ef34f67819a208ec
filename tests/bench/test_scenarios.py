"""Each kind of traffic against a server over the fake engine, and what the result says of it."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the server extra")
pytest.importorskip("httpx", reason="needs the bench extra")

from jaxserve.bench.config import BenchConfig
from jaxserve.bench.faults import kill_grammar_checkers
from jaxserve.bench.result import CellRun
from jaxserve.bench.run import Address, run_benchmark
from jaxserve.bench.summary import inversions, remarks
from jaxserve.bench.traffic import DoorError
from server.http.options import HttpOptions
from tests.bench.running import SMALL, bench, scenario
from tests.fake_model import fake_limits
from tests.server.harness import PacedEngine, SlowEngine, serving
from tests.server.http.running import http_server


def test_cold_and_warm_cells_differ_in_what_the_cache_has() -> None:
    matrix = {"uncached": [8], "prefix": [0, 16], "output": [4], "concurrency": [1, 3]}
    settings = {"matrix": matrix, "requests": 5, "quality": {"alone": 6}}
    with http_server() as server:
        result = bench(server, settings)
        again = bench(server, settings)  # The same prompts, of which it must find none.
    for one in (result, again):
        assert one.passed, one.checks
        assert [check.name for check in one.checks] == ["idle", "answered", "cold", "alone"]
        cached = {cell.name: {r.cached_tokens for r in cell.runs[0].requests} for cell in one.cells}
        assert {found for name, found in cached.items() if "cold" in name for found in found} == {0}
        assert {found for name, found in cached.items() if "warm" in name for found in found} == {16}
    assert len(result.cells) == 6
    assert result.served.precision == "float32"
    answers = [[[r.answer for r in cell.runs[0].requests] for cell in one.cells] for one in (result, again)]
    assert answers[0] == answers[1]


def test_a_burst_comes_at_once_and_again() -> None:
    with http_server() as server:
        cell = scenario(server, "burst", size=3, bursts=2, every=0.3)
    starts = [request.start for request in cell.runs[0].requests]
    assert max(starts[:3]) < 0.3 <= min(starts[3:])
    assert all(request.answered for request in cell.runs[0].requests)


def test_who_cancels_leaves_nothing_behind() -> None:
    with http_server() as server:
        cell = scenario(server, "cancellations", requests=8, at_once=4, after=3, output=60)
        assert server.loop.num_open == 0
    run = cell.runs[0]
    assert [request.cancelled for request in run.requests].count(True) == 4
    assert run.figures["completed"] == run.meant_to_end == 4
    assert run.figures["failed"] == 0
    assert any("4 were cancelled" in line for line in remarks(cell))


def test_who_is_refused_comes_again() -> None:
    device = SlowEngine(fake_limits(num_slots=1))
    with http_server(device, max_waiting=2) as server:
        cell = scenario(server, "retries", requests=5, attempts=4, output=3)
    requests = cell.runs[0].requests
    assert all(request.answered for request in requests)
    assert 1 < max(request.attempts for request in requests) <= 4
    assert max(request.ttft for request in requests) >= 1.0, "the time runs from the first try"
    assert any(line.startswith("5 requests took") for line in remarks(cell))


def test_who_is_refused_and_may_not_come_again_has_failed() -> None:
    device = SlowEngine(fake_limits(num_slots=1))
    with http_server(device, max_waiting=1) as server:
        cell = scenario(server, "retries", requests=5, attempts=1)
    failed = [request for request in cell.runs[0].requests if request.error]
    assert failed
    assert all(request.error.startswith("429") for request in failed)
    assert cell.runs[0].figures["failed"] == len(failed)


def test_tenants_are_told_apart_by_their_tokens() -> None:
    tokens = {"heavy": "one", "light": "two"}
    options = HttpOptions(tokens={token: name for name, token in tokens.items()})
    with http_server(options=options) as server:
        cell = scenario(server, "tenants", requests=12, rate=60.0, tokens=tokens)
        with pytest.raises(ValueError, match="tenant 'heavy' has no token"):
            scenario(server, "tenants", tokens={"light": "two"})
        with pytest.raises(DoorError, match="401 Unauthorized"):
            scenario(server, "burst", tokens={"nobody": "three"})
    assert all(request.answered for request in cell.runs[0].requests)
    lines = remarks(cell)
    assert {line.split(":")[0] for line in lines} == {"heavy", "light"}


def test_urgent_requests_are_not_overtaken_where_classes_are_kept() -> None:
    device = PacedEngine(fake_limits(num_slots=2))
    with http_server(device) as server:
        cell = scenario(server, "inversions", patient=12, urgent=4, seconds=0.4, patient_output=30, output=4)
    assert all(request.answered for request in cell.runs[0].requests)
    assert inversions(cell.runs[0]) == 0
    median = {
        group: sorted(request.ttft for request in cell.runs[0].requests if request.group == group)
        for group in ("urgent", "patient")
    }
    assert median["urgent"][2] < median["patient"][6]


def test_an_inversion_is_an_urgent_request_that_a_later_patient_one_overtakes() -> None:
    with http_server() as server:
        cell = scenario(server, "inversions", patient=2, urgent=1, seconds=0.1, patient_output=3)
    first, late, urgent = cell.runs[0].requests
    assert (first.group, late.group, urgent.group) == ("patient", "patient", "urgent")

    def run(late_ttft: float) -> CellRun:
        times = ((first, 0.0, 0.1), (urgent, 0.1, 1.0), (late, 0.2, late_ttft))
        requests = [replace(request, start=start, ttft=ttft) for request, start, ttft in times]
        return replace(cell.runs[0], requests=requests)

    assert inversions(run(late_ttft=0.5)) == 1
    assert inversions(run(late_ttft=0.95)) == 0


def test_grammars_are_checked_again_after_the_checkers_have_died() -> None:
    with http_server() as server:
        # So late that the checkers which the first requests have started are idle.
        cell = scenario(server, "failure", requests=7, rate=1.6, at=2.6, breaks="grammar-checker")
    groups = {request.group for request in cell.runs[0].requests}
    assert groups == {"before", "after"}
    assert all(request.answered for request in cell.runs[0].requests), remarks(cell)


def test_a_checker_that_is_not_there_cannot_be_broken() -> None:
    failure = {"kind": "failure", "requests": 1, "at": 0.0} | SMALL
    with http_server() as server, subprocess.Popen(["sleep", "60"]) as other:
        for pid, complaint in ((None, "needs --server-pid"), (other.pid, "has none that checks grammars")):
            with pytest.raises(ValueError, match=complaint):
                bench(server, {"scenario": {"failure": failure}}, pid=pid)
        other.kill()


def test_a_command_breaks_what_it_breaks_and_must_not_fail(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    with http_server() as server:
        command = {"breaks": "command", "requests": 4, "rate": 20.0, "at": 0.1}
        scenario(server, "failure", **command, command=["touch", str(broken)])
        assert broken.exists()
        with pytest.raises(ValueError, match="command false has ended with status 1"):
            scenario(server, "failure", **command, command=["false"])


def test_a_command_ends_with_the_run_that_is_broken_off(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$ > {told}; exec sleep 60"]
    failure = {"kind": "failure", "breaks": "command", "requests": 1, "at": 0.0, "command": command} | SMALL
    with http_server() as server:
        result = bench(server, {"max_seconds": 1.0, "scenario": {"failure": failure}})
    assert result.left_out == ["failure, repeat 1 of 1: there was no time for it"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_a_checker_that_has_just_ended_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    named = [sys.executable, "-c", "import time; time.sleep(60)", "jaxserve.structured.checker_process"]
    found: list[int] = []

    def kill(pid: int, number: int) -> None:
        found.append(pid)
        raise ProcessLookupError

    with subprocess.Popen(named) as checker:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", kill)
            assert kill_grammar_checkers(os.getpid()) == len(found)
        assert checker.pid in found
        checker.kill()


def test_answers_that_never_end_are_given_up() -> None:
    class Stuck(PacedEngine):
        pace = 0.5

    with http_server(Stuck(fake_limits())) as server:
        settings = {"scenario": {"b": {"kind": "burst", "size": 1, "bursts": 1} | SMALL}}
        result = bench(server, settings | {"warmups": 0, "request_seconds": 0.2})
    (request,) = result.cells[0].runs[0].requests
    assert request.error == "no end after 0.2 s"


def test_what_there_is_no_time_for_is_left_out_and_said() -> None:
    with http_server() as server:
        slow = {"kind": "burst", "size": 1, "bursts": 2, "every": 5.0} | SMALL
        result = bench(server, {"max_seconds": 1.0, "repeats": 2, "scenario": {"slow": slow}})
    assert result.left_out == [f"slow, repeat {repeat} of 2: there was no time for it" for repeat in (1, 2)]
    assert result.cells[0].runs == []


def test_requests_beyond_the_model_are_refused_before_any_is_sent() -> None:
    with (
        http_server() as server,
        pytest.raises(ValueError, match=r"140 tokens .* takes 128 \(max"),
    ):
        scenario(server, "burst", uncached=100, output=40)


def test_a_server_without_the_model_or_without_answers_is_named() -> None:
    named = "model 'other' is not served there; served: 'fake'"
    with http_server() as server, pytest.raises(DoorError, match=named):
        bench(server, {}, model="other")
    with pytest.raises(DoorError, match="does not say which models it has"):
        asyncio.run(run_benchmark(BenchConfig(), Address(url="http://127.0.0.1:1")))


def test_a_device_that_fails_is_told_in_the_result() -> None:
    device = PacedEngine(fake_limits(), fail_at=30)
    open_service = functools.partial(serving, device)
    with http_server(open_service=open_service) as server:
        matrix = {"uncached": [8], "output": [8], "concurrency": [2]}
        result = bench(server, {"requests": 12, "matrix": matrix})
    requests = result.cells[0].runs[0].requests
    assert [request.answered for request in requests].count(True) > 0
    assert [bool(request.error) for request in requests].count(True) > 0
    assert not result.passed
    assert not next(check for check in result.checks if check.name == "answered").passed
