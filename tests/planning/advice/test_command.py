"""`jaxserve advise` on a running server: put into a bad state, it is told so; in a good one, it is not."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

import httpx

from jaxserve.cli import main
from jaxserve.plan import EngineLimits
from jaxserve.scheduling import SchedulerPolicy
from tests.fake_model import fake_limits
from tests.planning.advice.measured import page_text
from tests.policies import UNFORESEEN
from tests.server.harness import PacedEngine, serving
from tests.server.http.running import HttpServer, http_server

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
LESSON = "Be kind to all who ask, say what you know, and stop when you have said it."


@contextmanager
def served(
    limits: EngineLimits, policy: SchedulerPolicy = UNFORESEEN, *, prefix_cache: bool = True
) -> Iterator[HttpServer]:
    service = functools.partial(
        serving, PacedEngine(limits), max_waiting=64, policy=policy, prefix_cache=prefix_cache
    )
    with http_server(open_service=service) as server:
        yield server


def ask(server: HttpServer, prompts: Sequence[str], max_tokens: int) -> None:
    """Ask everything at once, and wait for all answers."""
    body = {"model": "fake", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}

    def post(prompt: str) -> None:
        httpx.post(f"{server.url}/v1/completions", json=body | {"prompt": prompt}).raise_for_status()

    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(post, prompts))
    server.wait_until_idle()


def advised(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command says, in JSON, having looked once."""
    capsys.readouterr()
    assert main(["advise", *arguments, "--seconds", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    return report | {"advice": {one["rule"]: one for one in report["advice"]}}


def numbered(count: int) -> list[str]:
    return [f"{number} bottles" for number in range(count)]


def test_a_queue_before_full_slots(capsys: pytest.CaptureFixture[str]) -> None:
    with served(fake_limits(num_slots=1)) as server:
        ask(server, numbered(12), 12)
        bad = advised(capsys, server.url)
    with served(fake_limits(num_slots=16)) as server:
        ask(server, numbered(12), 110)
        good = advised(capsys, server.url)
    setting = {"place": "option", "name": "--num-slots", "value": "2"}
    assert bad["advice"]["slots-full"]["settings"] == [setting]
    assert "slots-full" in good["quiet"]


def test_a_pool_that_is_too_small_for_its_slots(capsys: pytest.CaptureFixture[str]) -> None:
    roomy = fake_limits(num_slots=8)
    with served(replace(roomy, num_pages=(41,)), prefix_cache=False) as server:
        ask(server, numbered(12), 60)
        bad = advised(capsys, server.url)
    with served(roomy, prefix_cache=False) as server:
        ask(server, numbered(12), 60)
        good = advised(capsys, server.url)
    advice = bad["advice"]["kv-oversubscribed"]
    assert "pages_ahead" in [setting["name"] for setting in advice["settings"]]
    assert "tokens were computed again" in advice["evidence"][1]
    verdicts = {one["question"]: one["verdict"] for one in bad["questions"]}
    assert verdicts["Is KV memory the limit?"] is True
    assert verdicts["Does it fit?"] is False
    assert "kv-oversubscribed" in good["quiet"]


def test_a_time_in_front_of_what_is_said_again_and_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    times = [f"It is 10:00:{second:02d}." for second in range(12)]

    def seen(prompts: Sequence[str]) -> dict[str, Any]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        with served(fake_limits(num_slots=2)) as server:
            ask(server, prompts, 20)
            return advised(capsys, server.url, str(path))

    bad = seen([f"{at} {LESSON}" for at in times])
    good = seen([f"{LESSON} {at}" for at in times])
    evidence = bad["advice"]["prompts-diverge"]["evidence"]
    assert "the server found" in evidence[1]
    assert "where a date or a time stands: after 'It is 10:00:0'" in evidence[2]
    assert "prompts-diverge" in good["quiet"]
    assert next(one for one in good["questions"] if "share" in one["question"])["verdict"] is True


def test_tokens_that_come_later_than_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with served(fake_limits(num_slots=4)) as server:
        ask(server, numbered(12), 60)
        slow = advised(capsys, server.url, "--tpot-limit", "0.5")
        quick = advised(capsys, server.url, "--tpot-limit", "5000")
    names = [setting["name"] for setting in slow["advice"]["batch-past-limit"]["settings"]]
    assert names == ["classes.default.tpot_target", "--num-slots"]
    assert "batch-past-limit" in quick["quiet"]


def test_two_looks_at_a_server_that_rests_between_tell_nothing_of_its_past(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with served(fake_limits(num_slots=1)) as server:
        ask(server, numbered(12), 12)
        assert main(["advise", server.url, "--seconds", "0.01", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "100 steps or more; there were 0" in report["not_judged"]["slots-full"]


def test_the_text_has_questions_advice_and_what_was_not_judged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.prom"
    page.write_text(page_text({'jaxserve:kept_out_steps_total{hurdle="rows"}': 300}))
    assert main(["advise", str(page)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 110
    for part in (
        "1. Does it fit? yes: ",
        "4. Is KV memory the limit? no: ",
        "5. Is latency per token the goal? not known: needs a limit",
        "batch-held-by-rows: larger prompt chunks\n  evidence   30% of steps",
        "  setting    --max-chunk 256\n",
        "  watch      jaxserve:kept_out_steps_total",
        "all is well   ",
        "not judged    ",
    ):
        assert part in said


def test_a_recorded_sweep_names_its_largest_load_within_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = RESULTS / "serving-sweep-cpu-2-cores.json"
    runs = json.loads(sweep.read_text())
    limit = 1.01 * runs[1]["p99_tpot_ms"]
    advice = advised(capsys, str(sweep), "--tpot-limit", str(limit))["advice"]["load-past-limit"]
    kept = max(run["max_concurrent_requests"] for run in runs if run["p99_tpot_ms"] <= limit)
    assert advice["settings"][0] == {"place": "option", "name": "--num-slots", "value": str(kept)}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/no/such/file"], "/no/such/file: no such file"),
        ([str(RESULTS / "offline-cpu-2-cores.json")], "is nothing that advice can rest on"),
        (["x", "--seconds", "-1"], "--seconds -1.0 is not a number from 0 up"),
        (["x", "--seconds", "nan"], "--seconds nan is not a number from 0 up"),
        (["x", "--tpot-limit", "0"], "tpot limit 0.0 s is not above 0"),
        (["x", "--without", "magic=y"], "--without 'magic=y': expected one of speculation"),
        (["x", "--without", "speculation"], "--without 'speculation': expected"),
        (["x", *["--without", "speculation=y"] * 2], "--without speculation is there twice"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(["advise", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxserve advise: error: ")
    assert error.count("\n") == 1
    assert complaint in error
