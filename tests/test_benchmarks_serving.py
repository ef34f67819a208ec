"""The serving benchmark: its workloads are fixed, its figures are right, and it speaks to every door."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="needs the server extra")
pytest.importorskip("smg_grpc_proto", reason="needs the server extra")
pytest.importorskip("httpx", reason="needs an HTTP client")

import itertools

from benchmarks.serving.__main__ import main
from benchmarks.serving.arguments import parse_arguments
from benchmarks.serving.workload import (
    Prompt,
    arriving,
    file_prompts,
    random_prompts,
    trace_prompts,
)
from jaxserve.bench.figures import read_goodput, report, summarise
from jaxserve.bench.traffic import Outcome, Run, Usage
from tests.server.process_harness import ROOT

VLLM_LABELS = (
    *("Successful requests:", "Benchmark duration (s):", "Total input tokens:", "Total generated tokens:"),
    *("Request throughput (req/s):", "Request goodput (req/s):", "Output token throughput (tok/s):"),
    *("Total token throughput (tok/s):", "Mean TTFT (ms):", "Median TPOT (ms):", "P99 ITL (ms):"),
    "P99 E2EL (ms):",
)
SHORT = ["--num-prompts", "6", "--input-len", "20", "--output-len", "8", "--spread", "0.5", "--quiet"]


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    """A server over the fake engine: its gRPC address and its URL."""
    command = [sys.executable, "-m", "tests.server.fake_server"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        grpc_address, url = process.stdout.readline().split()
        yield grpc_address, url
        process.kill()


def ask(addresses: tuple[str, str], *arguments: str) -> None:
    main(["--grpc-address", addresses[0], "--url", addresses[1], *SHORT, *arguments])


@pytest.mark.parametrize("door", ["http", "grpc", "vllm"])
def test_every_door_gives_the_same_work(
    addresses: tuple[str, str], door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    limits = "ttft:60000,tpot:60000,e2el:60000"
    ask(addresses, "--door", door, "--concurrency", "3", "--goodput", limits, "--json", str(path))
    text = capsys.readouterr().out
    assert all(label in text for label in VLLM_LABELS)
    figures = json.loads(path.read_text())
    prompts = random_prompts(6, input_len=20, output_len=8, spread=0.5, vocab_size=256, seed=0)
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert figures["total_input_tokens"] == sum(len(prompt.content) for prompt in prompts)
    assert figures["total_output_tokens"] == sum(prompt.max_tokens for prompt in prompts)
    assert figures["request_goodput"] == figures["request_throughput"]
    assert 1 <= figures["max_concurrent_requests"] <= 3
    assert 0 < figures["median_itl_ms"] < figures["median_ttft_ms"] < figures["median_e2el_ms"]
    assert "ttfts" not in figures


def test_a_sweep_is_a_run_for_each_load(addresses: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    results, picture = tmp_path / "runs.json", tmp_path / "sweep.png"
    ask(addresses, "--sweep", "concurrency=1,4", "--json", str(results), "--png", str(picture))
    one, four = json.loads(results.read_text())
    assert (one["max_concurrency"], four["max_concurrency"]) == (1, 4)
    assert one["output_throughput"] < four["output_throughput"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_requests_that_are_refused_are_counted_and_said(
    addresses: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "run.json", tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "output_tokens": 3}\n{"prompt": "%s"}\n' % ("long " * 100))
    source = ["--dataset", "jsonl", "--dataset-path", str(file)]
    ask(addresses, "--door", "grpc", *source, "--json", str(path), "--save-detailed")
    figures = json.loads(path.read_text())
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (3, 3, 9)
    assert [bool(error) for error in figures["errors"]] == [False, True] * 3
    assert "INVALID_ARGUMENT" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said_in_a_sentence() -> None:
    with pytest.raises(SystemExit, match="does not say which models it has"):
        main(["--url", "http://127.0.0.1:1", *SHORT])
    with pytest.raises(SystemExit, match="--door grpc needs --grpc-address"):
        main(["--url", "http://127.0.0.1:1", "--door", "grpc", *SHORT])


def test_figures_are_vllms() -> None:
    outcomes = [
        Outcome(start=0.0, ttft=0.1, itls=[0.2, 0.2], latency=0.5, usage=Usage(10, 3)),
        Outcome(start=0.5, ttft=0.3, itls=[], latency=0.3, usage=Usage(20, 1)),
        Outcome(start=0.1, error="refused"),
    ]
    figures = summarise(Run(outcomes, 2.0), {"ttft": 200.0, "tpot": 250.0})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["request_throughput"], figures["request_goodput"]) == (1.0, 0.5)
    assert (figures["output_throughput"], figures["total_token_throughput"]) == (2.0, 17.0)
    assert figures["mean_ttft_ms"] == pytest.approx(200.0)
    assert figures["mean_tpot_ms"] == pytest.approx(200.0), "an answer of one token has none"
    assert figures["max_output_tokens_per_s"] == 4.0
    assert figures["max_concurrent_requests"] == 1, "one ends as the other starts"
    assert "Request rate" not in report(figures)


def test_figures_of_nothing_are_zero() -> None:
    figures = summarise(Run([Outcome(start=0.0, error="refused")], 1.0))
    assert (figures["completed"], figures["p99_ttft_ms"], figures["request_goodput"]) == (0, 0.0, None)
    assert "Failed requests:                         1" in report(figures)


def test_prompts_are_fixed_by_their_seed() -> None:
    def make(seed: int) -> list[Prompt]:
        return random_prompts(50, input_len=40, output_len=10, spread=0.5, vocab_size=256, seed=seed)

    assert make(1) == make(1) != make(2)
    lens = [len(prompt.content) for prompt in make(1)]
    assert 20 <= min(lens) < max(lens) <= 60
    assert {prompt.max_tokens for prompt in make(1)} <= set(range(5, 16))
    assert all(0 <= token < 256 for prompt in make(1) for token in prompt.content if isinstance(token, int))


@pytest.mark.parametrize("burstiness", [0.2, 1.0, math.inf])
def test_arrivals_take_as_long_as_the_rate_says(burstiness: float) -> None:
    prompts = arriving([Prompt(content="x", max_tokens=1)] * 200, 10.0, burstiness, seed=3)
    arrivals = [prompt.arrival for prompt in prompts]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(20.0)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    variation = (sum((gap - 0.1) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / 0.1
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.3, abs=1e-6)


def test_a_trace_keeps_its_times_and_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": 600, "output_length": 7 * n, "hash_ids": [1, 10 + n]}
        for n in range(1, 5)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    prompts = trace_prompts(path, 3, load=2.0, longest_input=550, longest_output=15, vocab_size=256, seed=0)
    assert [prompt.arrival for prompt in prompts] == [0.0, 0.5, 1.0]
    assert [prompt.max_tokens for prompt in prompts] == [7, 14, 15]
    assert {len(prompt.content) for prompt in prompts} == {550}
    assert prompts[0].content[:512] == prompts[1].content[:512]
    assert prompts[0].content != prompts[1].content


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2]}\n{"prompt": ["a"]}\n')
    with pytest.raises(ValueError, match="line 2: expected an object whose `prompt`"):
        file_prompts(path, 5, 8)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        file_prompts(path, 5, 8)
    with pytest.raises(ValueError, match=r"spread 1\.5 is out of range"):
        random_prompts(1, input_len=1, output_len=1, spread=1.5, vocab_size=9, seed=0)
    with pytest.raises(ValueError, match=r"rate 0\.0"):
        arriving([], 0.0, 1.0, 0)
    with pytest.raises(ValueError, match="'itl:3': expected one of"):
        read_goodput("ttft:5,itl:3")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--png", "x.png"], "--png draws a sweep"),
        (["--sweep", "slots=1,2"], "expected rate=, concurrency="),
        (["--sweep", "rate=1,-2"], "every value must be above 0"),
        (["--library", "--url", "http://x"], "--library needs a server of its own"),
        (["--sweep", "rate=1,2", "--trace", "t.csv"], "a trace has its own times"),
        (["--num-prompts", "0"], "'0' is not a whole number"),
    ],
)
def test_arguments_that_do_not_go_together(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments("", arguments)
    assert complaint in capsys.readouterr().err
