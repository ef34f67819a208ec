"""What is read: pages, one or two, results, traces, prompts; and what is refused, by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("prometheus_client")

from jaxserve.planning.advice import (
    Limits,
    MetricsPage,
    NotMeasured,
    ServerWindow,
    Traffic,
    gather,
    open_window,
    parse_page,
    read_source,
)
from jaxserve.planning.advice.metrics_page import Histogram
from tests.planning.advice.measured import page_text

REPOSITORY = Path(__file__).resolve().parents[3]
RESULT = REPOSITORY / "benchmarks" / "results" / "serving-sweep-cpu-2-cores.json"
STEPS, TOKENS = "jaxserve:steps_total", "vllm:generation_tokens_total"
START = "process_start_time_seconds 5.0\n"


def window(*texts: str, model: str | None = None) -> ServerWindow:
    pages = [parse_page(f"page {number}", text) for number, text in enumerate(texts)]
    return ServerWindow(open_window(pages, model))


def test_between_two_pages_counters_and_histograms_are_differences() -> None:
    earlier = page_text() + START
    later = (
        page_text(
            {STEPS: 3000, TOKENS: 5000, 'jaxserve:kept_out_steps_total{hurdle="rows"}': 500}, num_answers=100
        )
        + START
    )
    for texts in ((earlier, later), (later, earlier)):
        seen = window(*texts)
        assert seen.num_steps == 2000
        assert seen.batch == 0.5
        assert seen.kept_out("rows") == 0.25
        assert seen.tpot.count == 20
        assert seen.tpot.mean == pytest.approx(0.025)
    assert window(later).batch == pytest.approx(5 / 3), "a single page counts from the start"


def test_a_page_of_several_models_needs_one_named() -> None:
    text = page_text(model="chat") + page_text({STEPS: 500}, model="small").split("\n", 1)[1]
    assert window(text, model="small").num_steps == 500
    assert window(text, model="chat").model == "chat"
    with pytest.raises(ValueError, match=r"page 0 has several models: name one by --model, of chat, small"):
        window(text)
    with pytest.raises(ValueError, match="no model 'large'; there is chat, small"):
        window(text, model="large")


def test_pages_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="not of one process"):
        window(page_text() + START, page_text() + "process_start_time_seconds 6.0\n")
    with pytest.raises(ValueError, match="3 metrics pages; at most two"):
        window(page_text(), page_text(), page_text())
    with pytest.raises(ValueError, match="page 1 has no model 'fake'"):
        window(page_text(), page_text(model="other"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# Heading\n\nSome prose.\n", "is no metrics page"),
        ("<html></html>", "is no metrics page"),
        ("process_open_fds 7.0\n", "has no metric of a model"),
    ],
)
def test_what_is_no_page_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"the page {complaint}"):
        parse_page("the page", text)


def test_a_metric_that_is_not_there_is_named() -> None:
    seen = window(page_text(lacking=("vllm:num_preemptions",)))
    with pytest.raises(NotMeasured, match="vllm:num_preemptions_total, which page 0 does not have"):
        _ = seen.num_preemptions


@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    bounds = (0.25, 0.5, 0.75, 1.0, math.inf)
    counts = [sum(low < value <= high for value in values) for low, high in pairwise((0.0, *bounds))]
    histogram = Histogram(bounds, tuple(map(float, counts)), sum(values))
    exact = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    upper = next(bound for bound in bounds if exact <= bound)
    assert upper - 0.25 <= histogram.quantile(share) <= upper
    assert histogram.mean == pytest.approx(sum(values) / len(values))


def test_what_lies_beyond_all_bounds_counts_as_the_last_of_them() -> None:
    assert Histogram((1.0, math.inf), (0.0, 3.0), 30.0).quantile(0.5) == 1.0
    assert math.isnan(Histogram((1.0, math.inf), (0.0, 0.0), 0.0).quantile(0.5))


def test_files_are_told_by_what_they_hold(tmp_path: Path) -> None:
    def written(text: str) -> Path:
        path = tmp_path / "file"
        path.write_text(text)
        return path

    assert isinstance(read_source(written(page_text())), MetricsPage)
    assert isinstance(read_source(RESULT), list)
    prompts = read_source(written('{"prompt": "one"}\n{"prompt": "two"}\n'))
    assert isinstance(prompts, Traffic)
    assert prompts.answers is None
    for trace in (
        '{"arrival": 0.0, "prompt_tokens": 7, "output_tokens": 3}\n',
        '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n',
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,374,44\n",
    ):
        recorded = read_source(written(trace))
        assert isinstance(recorded, Traffic)
        assert recorded.answers is not None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "nothing that advice can rest on"),
        (b"some prose\n", "nothing that advice can rest on"),
        (b"\xff\xfe\x00", "is not a text in UTF-8"),
        (b"[]", "is an empty list"),
        (b"[3]", "int instead of a benchmark result"),
        (b'{"output_throughput": 3}', "no request of the benchmark|completed None is not a number"),
        (b'{"completed": 0, "output_throughput": 0}', "no request of the benchmark was answered"),
        (b'{"arrival": 1}', "line 1: prompt_tokens is missing"),
        (b"a,b\n1,2\n", "line 1: not a trace that is known"),
        (b'{"text": "x"}', "line 1: no prompt"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}.*({complaint})"):
        read_source(path)


def test_only_one_traffic_and_a_result_for_a_comparison(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n')
    with pytest.raises(ValueError, match="2 traces or prompt files"):
        gather([str(path), str(path)], limits=Limits())
    with pytest.raises(ValueError, match=r"prompts.jsonl is not a result of benchmarks.serving"):
        gather([str(RESULT)], limits=Limits(), without={"speculation": path})
    seen = gather([str(RESULT), str(path)], limits=Limits(tpot=0.05), without={"speculation": RESULT})
    assert len(seen.runs) == len(seen.without("speculation")) == len(json.loads(RESULT.read_text()))
    assert seen.traffic.num_requests == 1
    with pytest.raises(NotMeasured):
        _ = seen.server


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_limit_is_above_nothing(seconds: float) -> None:
    with pytest.raises(ValueError, match="tpot limit"):
        Limits(tpot=seconds)


@pytest.fixture
def pages() -> Iterator[tuple[str, list[bytes]]]:
    """An address at which each of these pages is answered once, and the last for good."""
    answers: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", answers
        server.shutdown()
        thread.join()


def test_a_server_is_looked_at_twice(pages: tuple[str, list[bytes]]) -> None:
    address, answers = pages
    answers += [page_text().encode(), page_text({STEPS: 1500}).encode()]
    slept: list[float] = []
    seen = gather([address], limits=Limits(), seconds=7.0, sleep=slept.append)
    assert slept == [7.0]
    assert seen.server.num_steps == 500
    once = gather([f"{address}/metrics"], limits=Limits(), sleep=slept.append)
    assert once.server.num_steps == 1500
    assert slept == [7.0]


def test_an_address_without_metrics_is_refused(pages: tuple[str, list[bytes]]) -> None:
    address, answers = pages
    answers.append(b"<html></html>")
    with pytest.raises(ValueError, match=f"{address}/metrics is no metrics page"):
        gather([address], limits=Limits())
    with pytest.raises(
        ValueError, match=f"{address}/other does not answer with a metrics page: .*404|Not Found"
    ):
        gather([f"{address}/other"], limits=Limits())
    with pytest.raises(ValueError, match=r"127.0.0.1:1/metrics does not answer"):
        gather(["http://127.0.0.1:1"], limits=Limits())
