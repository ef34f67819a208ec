"""Figures of simulations: percentiles, goodput against targets, groups, the command's output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.simulate import main
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.planning import Simulation, Target, Trace, TraceRequest, summarise, table, write_trace
from jaxserve.planning.plots import draw_timelines
from jaxserve.planning.records import COMPLETED, Records, Timeline
from tests.fake_limits import make_limits


def output(arrival: float, scheduled: float, first: float, end: float, num_tokens: int) -> RequestOutput:
    sample = CompletionOutput(
        index=0,
        text="",
        token_ids=[0] * num_tokens,
        logprobs=None,
        cumulative_logprob=None,
        finish_reason="length",
        stop_reason=None,
    )
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[sample],
        seed=0,
        metrics=RequestMetrics(
            arrival_time=arrival,
            scheduled_time=scheduled,
            first_token_time=first,
            finish_time=end,
            num_preemptions=2,
        ),
        num_cached_tokens=30,
    )


def simulation() -> Simulation:
    """Four requests in 10 s: two served, one cut off while it waited, one refused."""
    requests = (
        TraceRequest(arrival=0.0, prompt_tokens=40, output_tokens=11, tenant="a", priority="interactive"),
        TraceRequest(arrival=1.0, prompt_tokens=40, output_tokens=1, tenant="a"),
        TraceRequest(arrival=2.0, prompt_tokens=40, output_tokens=9, tenant="b"),
        TraceRequest(arrival=10.0, prompt_tokens=40, output_tokens=9, tenant="b"),
    )
    trace = Trace("made up", requests)
    records = Records(trace)
    records.finish(0, COMPLETED, output(0.0, 0.5, 1.0, 2.0, 11))
    records.finish(1, COMPLETED, output(1.0, 2.0, 4.0, 4.0, 1))
    cut_off = output(2.0, np.nan, np.nan, 9.0, 0)
    records.finish(2, "expired", cut_off)
    records.reject(3, "queue full", 10.0)
    return Simulation(trace, make_limits(), records, Timeline(), 12.0, 6.0, 100, 81)


def test_figures_by_hand() -> None:
    found = summarise(simulation(), {"interactive": Target(ttft=1.0, tpot=0.1), "default": Target(ttft=2.9)})
    overall = found.overall
    assert (overall.num_requests, overall.num_completed) == (4, 2)
    assert overall.rejected == {"queue full": 1}
    assert overall.cut_off == {"expired": 1}
    assert overall.queue.p50 == pytest.approx(0.75)
    assert overall.max_wait == 7.0  # in vain, of the one that expired
    assert overall.ttft.p50 == pytest.approx(2.0)
    assert overall.tpot.p99 == pytest.approx(0.1)  # an answer of one token has none
    assert overall.num_good == 1
    assert overall.goodput == pytest.approx(0.1)
    assert overall.good_share == 0.25
    assert found.by_tenant["a"].num_good == 1
    assert found.by_tenant["b"].max_wait == 7.0
    assert found.by_priority["default"].num_good == 0
    assert found.preemptions == 6
    assert found.reuse == pytest.approx(90 / 120)
    assert found.output_tokens_per_second == 1.0
    assert found.busy_share == 0.5


def test_without_targets_all_that_is_completed_is_good() -> None:
    assert summarise(simulation()).overall.num_good == 2


def test_a_request_ends_once() -> None:
    records = simulation().records
    with pytest.raises(RuntimeError, match="request 3 ended twice: queue full, then too long"):
        records.reject(3, "too long", 11.0)


def test_json_has_no_numbers_that_json_has_not() -> None:
    plain = summarise(simulation()).to_json()
    text = json.dumps(plain, allow_nan=False)
    assert json.loads(text)["by_tenant"]["b"]["ttft"]["p50"] is None


def test_a_table_has_a_line_for_each_group() -> None:
    found = summarise(simulation())
    lines = table([("all", found.overall), ("b", found.by_tenant["b"])]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split()[:5] == ["all", "4", "2", "1", "1"]
    assert "-" in lines[2].split()


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no simulation to draw"):
        draw_timelines({}, tmp_path / "none.png")


SMALL = [
    "--model",
    "smollm2-135m",
    "--chip",
    "v5e",
    "--slots",
    "16",
    "--max-chunk",
    "256",
    "--policy",
    "fcfs",
]


def small_trace(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    requests = [
        TraceRequest(arrival=number / 50, prompt_tokens=1 + 37 * number % 700, output_tokens=1 + number % 30)
        for number in range(100)
    ]
    write_trace(Trace("small", tuple(requests)), path)
    return path


def test_the_command_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    trace = str(small_trace(tmp_path))
    main(["--trace", trace, "--load", "1,10", "--tenants", "a=1,b=1", "--json", str(figures), *SMALL])
    printed = capsys.readouterr().out
    assert "load 10" in printed
    assert "fcfs: b" in printed
    runs: list[dict[str, Any]] = json.loads(figures.read_text())
    assert [(run["load"], run["policy"], run["overall"]["num_completed"]) for run in runs] == [
        (1.0, "fcfs", 100),
        (10.0, "fcfs", 100),
    ]


def test_a_policy_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "strict.toml"
    policy.write_text("[classes.default]\nmax_waiting = 0\n")
    slow = ["--slots", "1", "--load", "100"]
    main(["--trace", str(small_trace(tmp_path)), *SMALL, *slow, "--policy", f"fcfs,{policy}"])
    printed = capsys.readouterr().out
    assert "fcfs: " in printed
    assert "refused: none" in printed
    assert "strict: " in printed
    assert "queue_full" in printed


def test_the_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timeline.png"
    main(["--trace", str(small_trace(tmp_path)), "--png", str(picture), *SMALL])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--seconds", "-1"], "no request between"),
        (["--model", "gpt-9"], "gpt-9"),
        (["--num-chips", "1", "--model", "llama-3.1-70b"], "the weights take"),
        (["--tenants", "a=-1"], "not all above 0"),
        (["--policy", "best"], "policy 'best' is neither one of fcfs"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        main(["--trace", str(small_trace(tmp_path)), *SMALL, *arguments])
