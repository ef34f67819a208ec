"""A server that says what it should not costs the request or the cell in which it does, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx", reason="needs the bench extra")

from jaxserve.bench import http_stream
from jaxserve.bench.config import BenchConfig
from jaxserve.bench.result import Result
from jaxserve.bench.run import Address, run_benchmark
from jaxserve.bench.summary import table
from jaxserve.bench.traffic import DoorError
from tests.bench.other_server import Json, OtherServer, good_events, other_server
from tests.bench.running import SMALL

NO_EVENTS = [
    "{",
    "[]",
    "7",
    "{}",
    '{"choices": null}',
    '{"choices": [{}]}',
    '{"choices": [{"text": null}]}',
    '{"choices": [{"text": 7}]}',
    '{"choices": [], "usage": {"prompt_tokens": 1}}',
    '{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": "2"}}',
    '{"choices": [], "usage": [1]}',
    '{"error": "no message"}',
    "[" * 100_000,
]


@pytest.fixture
def server() -> Iterator[OtherServer]:
    with other_server() as running:
        yield running


def bench(server: OtherServer, settings: dict[str, Any]) -> Result:
    config = BenchConfig.from_mapping({"repeats": 1, "warmups": 1, "request_seconds": 20.0} | settings)
    return asyncio.run(run_benchmark(config, Address(url=server.url)))


def test_an_event_that_is_no_completion_is_its_request_s_error(server: OtherServer) -> None:
    left = [*NO_EVENTS]
    server.events = lambda body: ['{"choices": [{"text": "a"}]}', left.pop()]
    burst = {"kind": "burst", "size": len(NO_EVENTS), "bursts": 1} | SMALL
    result = bench(server, {"warmups": 0, "scenario": {"odd": burst}})
    errors = {request.error for request in result.cells[0].runs[0].requests}
    assert errors == {f"no event of a completion: {event[:200]}" for event in NO_EVENTS}


def test_a_cell_whose_cache_is_not_filled_is_left_out_and_the_rest_are_kept(server: OtherServer) -> None:
    def events(body: Json) -> list[str]:
        return (
            ["odd"] if body["max_tokens"] == 1 else good_events(body)
        )  # What fills a cache wants one token.

    server.events = events
    matrix = {"uncached": [8], "prefix": [16], "output": [4], "concurrency": [2], "cache": ["warm", "cold"]}
    result = bench(server, {"matrix": matrix, "requests": 3, "quality": {"alone": 0}})
    warm, cold = result.cells
    assert not warm.runs
    assert [request.answered for request in cold.runs[0].requests] == [True] * 3
    reason = "the request that fills the cache failed: no event of a completion: odd"
    assert result.left_out == [f"{warm.name}, repeat 1 of 1: {reason}"]
    (answered,) = (check for check in result.checks if check.name == "answered")
    assert not answered.passed
    assert "repeats of its cells that were left out: 1" in answered.detail
    assert f"left out: {warm.name}, repeat 1 of 1: {reason}" in table(result, 1.0, 0.1)


def test_metrics_that_are_none_tell_nothing(server: OtherServer) -> None:
    pages = iter(["", "vllm:num_requests_running much\n"])  # Asked for the model, then what is open.
    server.pages["/metrics"] = lambda: next(pages)
    result = bench(server, {"scenario": {"calm": {"kind": "burst", "size": 1, "bursts": 1} | SMALL}})
    (run,) = result.cells[0].runs
    assert run.idle_seconds is None
    assert all(request.answered for request in run.requests)


def test_a_server_that_hangs_is_not_waited_for(server: OtherServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_stream, "PAGE_SECONDS", 0.5)
    calm = {"scenario": {"calm": {"kind": "burst", "size": 1, "bursts": 1} | SMALL}}
    server.pages["/metrics"] = server.hang
    with pytest.raises(DoorError, match=r"has gone: no answer from /metrics within 0\.5 s"):
        bench(server, calm)
    pages = iter([""])  # It hangs when everything has been answered.
    server.pages["/metrics"] = lambda: "" if next(pages, None) == "" else server.hang()
    result = bench(server, calm)
    assert [run.idle_seconds for run in result.cells[0].runs] == [None]
    server.pages["/v1/models"] = server.hang
    with pytest.raises(DoorError, match=r"no answer from /v1/models within 0\.5 s"):
        bench(server, calm)
