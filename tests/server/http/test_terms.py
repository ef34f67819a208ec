"""How a call is served, over HTTP: prefix reuse, classes, quotas, deadlines, retries."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from jaxserve.scheduling import SchedulerPolicy
from server.http.options import HttpOptions
from tests.fake_model import fake_limits
from tests.server.harness import SlowEngine, serving
from tests.server.http.running import HttpServer, http_server

PROMPT = "the same beginning of everything, "
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
LONG = BODY | {"max_tokens": 30}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture(autouse=True)
def cold(request: pytest.FixtureRequest) -> None:
    """Every test of the shared server begins without a cached prefix."""
    if "server" in request.fixturenames:
        post(request.getfixturevalue("server"), {}, "/reset_prefix_cache").raise_for_status()


def post(
    server: HttpServer, body: dict[str, Any], path: str = "/v1/completions", **headers: str
) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(server.url + path, json=body, headers=named, timeout=20)


def cached(server: HttpServer, body: dict[str, Any] = BODY, **headers: str) -> int:
    answer = post(server, body, **headers).raise_for_status().json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_warm_answer_is_the_cold_one(server: HttpServer, stream: bool) -> None:
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 2,
    }

    def ask() -> tuple[list[Any], int]:
        if not stream:
            answer = client.chat.completions.create(**asked)
            logprobs = answer.choices[0].logprobs.content
            return logprobs, answer.usage.prompt_tokens_details.cached_tokens
        chunks = list(
            client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
        said = [one for part in parts if part for one in part.content]
        return said, chunks[-1].usage.prompt_tokens_details.cached_tokens

    (cold_said, cold_count), (warm_said, warm_count) = ask(), ask()
    assert warm_said == cold_said != []
    assert cold_count == 0 < warm_count


def test_what_a_call_shares_is_its_choice(server: HttpServer) -> None:
    assert cached(server) == 0
    assert cached(server) > 0
    assert cached(server, BODY | {"cache_read": False}) == 0
    assert cached(server, BODY | {"cache_salt": "n"}) == 0
    assert cached(server, BODY | {"cache_namespace": "n"}) > 0  # Two names of one thing.
    assert cached(server, BODY | {"cache_salt": "m", "cache_write": False}) == 0
    assert cached(server, BODY | {"cache_salt": "m"}) == 0


def test_prefixes_are_forgotten_on_demand(server: HttpServer) -> None:
    cached(server)
    answer = post(server, {}, "/reset_prefix_cache?model=fake").json()
    assert answer["forgotten_pages"]["fake"] > 0
    assert cached(server) == 0
    assert post(server, {}, "/reset_prefix_cache?model=other").status_code == 404


def test_tenants_share_nothing_and_flush_their_own() -> None:
    options = HttpOptions(tokens={"a-token": "a", "b-token": "b"})
    with http_server(options=options) as server:
        a, b = "Bearer a-token", "Bearer b-token"
        assert cached(server, authorization=a) == 0
        assert cached(server, authorization=b) == 0
        assert cached(server, authorization=b) > 0
        post(server, {}, "/reset_prefix_cache", authorization=a).raise_for_status()
        assert cached(server, authorization=b) > 0
        assert cached(server, authorization=a) == 0
        assert post(server, {}, "/reset_prefix_cache").status_code == 401


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"priority": 3}, {}, "priority"),
        ({"priority": True}, {}, "priority"),
        ({"cache_read": "yes"}, {}, "cache_read"),
        ({"cache_salt": 5}, {}, "cache_salt"),
        ({"cache_salt": "a", "cache_namespace": "a"}, {}, "cache_salt"),
        ({}, {"x_jaxserve_timeout": "soon"}, "x-jaxserve-timeout"),
    ],
)
def test_terms_that_make_no_sense_are_named(
    server: HttpServer, body: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    answer = post(server, BODY | body, **headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_unknown_class_hears_which_there_are(server: HttpServer) -> None:
    for answer in (post(server, BODY | {"priority": "gold"}), post(server, BODY, x_jaxserve_priority="gold")):
        assert answer.status_code == 400
        assert "interactive, default, retry, batch" in answer.json()["error"]["message"]


def test_the_class_is_the_bodys_or_the_headers_and_a_retry_is_known(server: HttpServer) -> None:
    counts = server.service.statistics.num_requests

    def served(body: dict[str, Any], **headers: str) -> str:
        before = counts.copy()
        post(server, BODY | body, **headers).raise_for_status()
        ((name, _, _),) = counts - before
        return name

    assert served({"priority": "batch"}) == "batch"
    assert served({}, x_jaxserve_priority="interactive") == "interactive"
    assert served({"priority": "batch"}, x_jaxserve_priority="interactive") == "batch"
    assert served({"priority": 0}) == "default"
    assert served({}, x_jaxserve_retry="1") == "retry"
    assert served({}, x_stainless_retry_count="2") == "retry"
    assert served({}, x_stainless_retry_count="0") == "default"


@contextmanager
def busy(settings: Mapping[str, Any], num_open: int = 2) -> Iterator[HttpServer]:
    """One slot of 20 ms a step, and so many requests there."""
    policy = SchedulerPolicy.from_mapping(settings)
    device = SlowEngine(fake_limits(num_slots=1))
    open_service = functools.partial(serving, device, policy=policy)
    with http_server(open_service=open_service) as server:
        threads = [threading.Thread(target=post, args=(server, LONG)) for _ in range(num_open)]
        for number, thread in enumerate(threads, start=1):
            thread.start()
            server.wait_until(lambda number=number: server.service.engine.num_open == number)
            if number == 1:
                server.wait_until(lambda: server.service.engine.snapshot().num_sampled > 0)
        yield server
        for thread in threads:
            thread.join()


OVERLOADS: dict[str, tuple[Mapping[str, Any], int]] = {
    "queue_full": ({"classes": {"default": {"max_waiting": 1}}}, 2),
    "tokens": ({"classes": {"default": {"max_waiting_tokens": 100}}}, 2),
    "kv": ({"classes": {"default": {"max_waiting_pools": 0.1}}}, 2),
    "tenant_quota": ({"other_tenants": {"max_open": 1}}, 1),
    "rate": ({"other_tenants": {"tokens_per_second": 2.0, "burst": 10.0}}, 1),
    "retry_budget": ({"retries": {"ratio": 0.0, "at_least": 0}}, 1),
}


@pytest.mark.parametrize("reason", OVERLOADS)
def test_each_refusal_is_a_429_with_its_reason_and_a_time(reason: str) -> None:
    with busy(*OVERLOADS[reason]) as server:
        marks = {"x_jaxserve_retry": "1"} if reason == "retry_budget" else {}
        refused = post(server, LONG, **marks)
        assert refused.status_code == 429
        assert refused.headers["x-jaxserve-reason"] == reason
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_deadline_that_passes_in_the_queue_is_a_504() -> None:
    with busy({}, 1) as server:
        late = post(server, LONG, x_jaxserve_timeout="0.1")
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline_exceeded"


def test_classes_are_gauged_and_the_cache_is_counted() -> None:
    with busy({}) as server:
        text = httpx.get(f"{server.url}/metrics").text
    assert 'jaxserve:class_requests_running{class="default",model_name="fake"} 1.0' in text
    assert 'jaxserve:class_requests_waiting{class="default",model_name="fake"} 1.0' in text
    assert 'jaxserve:class_requests_waiting{class="batch",model_name="fake"} 0.0' in text
    queries = next(line for line in text.splitlines() if line.startswith("vllm:prefix_cache_queries_total{"))
    assert float(queries.split()[-1]) == len(PROMPT) + 1  # That begins every text.
