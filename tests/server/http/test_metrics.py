"""The metrics of a running server: what moves, by how much, and what never grows without bound."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

from server.core import GenerateRequest, Routes, ServiceError, Status  # noqa: E402
from server.core.telemetry.families import FAMILIES  # noqa: E402
from server.core.telemetry.prometheus import CALLS, Metrics  # noqa: E402
from tests.fake_model import fake_limits  # noqa: E402
from tests.server.harness import GREEDY, PacedEngine, SlowEngine, serving  # noqa: E402
from tests.server.http.running import HttpServer, http_server  # noqa: E402
from tests.server.http.scrape import Scrape  # noqa: E402
from tests.server.simulated_day import World, healthy, make_record  # noqa: E402

SHORT = {"model": "fake", "prompt": "one", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 100}


def post(server: HttpServer, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body)


@contextmanager
def in_background(server: HttpServer, *bodies: dict[str, Any]) -> Iterator[None]:
    threads = [threading.Thread(target=post, args=(server, body)) for body in bodies]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def test_answers_are_counted_and_timed() -> None:
    with http_server() as server:
        before = Scrape(server.url)
        assert before.value("vllm:request_success_total", finished_reason="length") == 0
        assert before.value("vllm:num_requests_running") == before.value("vllm:kv_cache_usage_perc") == 0
        for _ in range(2):
            post(server, SHORT).raise_for_status()
        post(server, SHORT | {"n": 3}).raise_for_status()
        server.wait_until_idle()
        after = Scrape(server.url)
    num_prompt, num_answer = len("one") + 1, 12
    assert after.value("vllm:request_success_total", finished_reason="length") == 3
    assert after.value("vllm:generation_tokens_total") == 5 * num_answer
    assert after.value("vllm:request_generation_tokens_sum") == 5 * num_answer
    assert after.value("vllm:request_prompt_tokens_sum") == 3 * num_prompt
    assert after.value("vllm:request_params_n_sum") == 5
    assert after.value("vllm:request_params_max_tokens_sum") == 3 * num_answer
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
    ):
        assert after.value(f"{name}_count") == 3
        assert after.value(f"{name}_bucket", le="+Inf") == 3
        assert after.value(f"{name}_sum") > 0
    assert after.value("vllm:inter_token_latency_seconds_count") == 5 * (num_answer - 1)
    longest = after.value("vllm:e2e_request_latency_seconds_sum")
    assert longest >= after.value("vllm:time_to_first_token_seconds_sum")
    assert (
        after.value("jaxserve:requests_total", outcome="length", tenant="none", **{"class": "default"}) == 3
    )
    assert after.value("jaxserve:request_tokens_total", tenant="none", kind="generated") == 5 * num_answer


def test_steps_are_counted_by_rows_and_the_stages_are_all_the_time() -> None:
    with http_server() as server:
        first = Scrape(server.url)
        post(server, SHORT).raise_for_status()
        server.wait_until_idle()
        second = Scrape(server.url)
    rows = "vllm:iteration_tokens_total"
    assert second.value(f"{rows}_count") == second.value("jaxserve:steps_total") >= 12
    assert second.value(f"{rows}_sum") >= len("one") + 12
    stages = {labels["stage"] for labels in second.labels("jaxserve:host_stage_seconds_total")}
    assert stages >= {"plan", "dispatch", "wait", "commit", "idle"}
    for stage in stages:
        spent = [one.value("jaxserve:host_stage_seconds_total", stage=stage) for one in (first, second)]
        assert 0 <= spent[0] <= spent[1]


def test_steps_are_timed_by_their_size_and_say_what_was_waited_for() -> None:
    with http_server(SlowEngine(fake_limits(num_slots=1))) as server:
        idle = Scrape(server.url)
        with in_background(server, SHORT, SHORT):
            pass
        server.wait_until_idle()
        after = Scrape(server.url)
    assert idle.value("jaxserve:kept_out_steps_total", hurdle="slots") == 0
    assert after.value("jaxserve:kept_out_steps_total", hurdle="slots") > 5
    assert after.value("jaxserve:kept_out_steps_total", hurdle="pages") == 0
    num_steps = after.value("jaxserve:decode_steps_total", rows="1")
    assert num_steps >= 2 * 11
    assert after.value("jaxserve:decode_step_seconds_total", rows="1") >= num_steps * SlowEngine.pace * 0.9
    assert after.value("jaxserve:recomputed_tokens_total") == 0


def test_tokens_move_while_a_stream_runs() -> None:
    with http_server(SlowEngine(fake_limits(num_slots=1))) as server, in_background(server, LONG, SHORT):
        server.wait_until(lambda: server.service.load().num_waiting == 1)
        server.wait_until(lambda: server.service.engine.snapshot().num_sampled > 5)
        during = Scrape(server.url)
        assert during.value("vllm:num_requests_running") == during.value("vllm:num_requests_waiting") == 1
        assert 0 < during.value("vllm:kv_cache_usage_perc") < 1
        assert during.value("vllm:generation_tokens_total") > 5
        assert during.value("vllm:prompt_tokens_total") == len("one") + 1
        assert during.value("vllm:time_to_first_token_seconds_count") == 1
        assert during.value("vllm:inter_token_latency_seconds_count") > 3
        assert during.value("vllm:e2e_request_latency_seconds_count") == 0


def test_refusals_are_counted_by_why_and_calls_by_status() -> None:
    with http_server(SlowEngine(fake_limits(num_slots=1)), max_waiting=0) as server:
        with in_background(server, SHORT):
            server.wait_until(lambda: server.service.engine.num_open == 1)
            assert post(server, SHORT).status_code == 429
        assert post(server, SHORT | {"prompt": [10**6]}).status_code == 400
        assert post(server, SHORT | {"temperature": "hot"}).status_code == 400
        assert post(server, SHORT | {"model": "other"}).status_code == 404
        assert post(server, SHORT, "/v1/nonsense").status_code == 404
        after = Scrape(server.url)

    def calls(call: str, code: str) -> float:
        names = {"door": "http", "call": call, "code": code}
        return after._found[f"{CALLS}_total", frozenset(names.items())]

    assert after.value("jaxserve:request_refused_total", status="resource_exhausted") == 1
    assert after.value("jaxserve:request_refused_total", status="invalid_argument") == 1
    assert after.value("jaxserve:admission_rejections_total", reason="queue_full") == 1
    assert [calls("completions", code) for code in ("200", "400", "404", "429")] == [1, 2, 1, 1]
    assert calls("unknown", "404") == 1


def test_the_gateways_and_dashboards_of_vllm_find_their_names() -> None:
    with http_server() as server:
        post(server, SHORT).raise_for_status()
        found = Scrape(server.url)
    (cache,) = found.labels("vllm:cache_config_info")
    limits = fake_limits()
    assert cache["block_size"] == str(limits.page_size)
    assert cache["num_gpu_blocks"] == str(limits.num_pages[0] - 1)
    assert found.names >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:iteration_tokens_total_bucket",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "process_resident_memory_bytes",
    }


def test_several_models_share_one_registry() -> None:
    async def main() -> str:
        async with serving() as (chat, _), serving(PacedEngine(fake_limits(num_slots=2))) as (small, _):
            renamed: Any = SimpleNamespace(services=(chat, _named(small, "small")), calls=Counter())
            generation = await small.generate(GenerateRequest(text="x", params=GREEDY))
            assert [delta async for delta in generation]
            return Metrics(renamed).text().decode()

    lines = asyncio.run(main()).splitlines()
    assert 'vllm:request_success_total{finished_reason="length",model_name="fake"} 0.0' in lines
    assert 'vllm:request_success_total{finished_reason="length",model_name="small"} 1.0' in lines
    assert 'jaxserve:num_slots{model_name="small"} 2.0' in lines
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def _named(service: Any, name: str) -> Any:
    service.identity = service.identity.__class__(**(vars(service.identity) | {"name": name}))
    return service


def test_no_client_can_make_labels_without_end() -> None:
    world = World([])
    statistics = world.service.statistics
    for number in range(200):
        statistics.count(make_record(tenant=f"tenant-{number}", priority=f"made-up-{number}"))
        error = ServiceError(Status.RESOURCE_EXHAUSTED, "full", reason=f"reason-{number}")
        statistics.count(make_record(error=error, admitted=False, tenant=f"stranger-{number}"))
    before = world.metrics.text().count(b"\n")
    for number in range(200, 400):
        statistics.count(make_record(tenant=f"tenant-{number}", priority=f"made-up-{number}"))
    text = world.metrics.text().decode()
    assert text.count("\n") == before
    assert 'tenant="tenant-31"' in text
    assert 'tenant="tenant-32"' not in text
    assert "stranger" not in text, "whoever is refused names nothing"
    assert text.count("jaxserve:admission_rejections_total{") == 33


def test_goodput_is_held_against_each_class() -> None:
    world = World([])
    for ttft, tpot in ((0.5, 0.02), (3.0, 0.02), (0.5, 0.3)):
        world.answer(priority="interactive", ttft=ttft, tpot=tpot)
        world.answer(priority="batch", ttft=ttft, tpot=tpot)
    world.fail(ServiceError(Status.INTERNAL, "broken"), admitted=True)
    world.fail(ServiceError(Status.CANCELLED, "gone"), admitted=True)
    world.answer(priority="interactive", finish_reason="abort")
    lines = world.metrics.text().decode().splitlines()
    for line in (
        'jaxserve:judged_requests_total{class="interactive",model_name="fake"} 3.0',
        'jaxserve:goodput_requests_total{class="interactive",model_name="fake"} 1.0',
        'jaxserve:goodput_tokens_total{class="interactive",model_name="fake"} 11.0',
        'jaxserve:ttft_target_seconds{class="interactive",model_name="fake"} 1.0',
        'jaxserve:judged_requests_total{class="default",model_name="fake"} 1.0',
        'jaxserve:goodput_requests_total{class="default",model_name="fake"} 0.0',
        'jaxserve:judged_requests_total{class="batch",model_name="fake"} 0.0',
        'jaxserve:class_time_to_first_token_seconds_count{class="batch",model_name="fake"} 3.0',
    ):
        assert line in lines
    assert not any(line.startswith('jaxserve:ttft_target_seconds{class="batch"') for line in lines)


def test_every_family_is_exposed_under_its_name_and_kind() -> None:
    world = World([])
    world.run(1, healthy)
    text = world.metrics.text().decode()
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    for family in FAMILIES:
        assert types[family.name + "_total" * (family.kind == "counter")] == family.kind
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_routes_are_what_is_measured() -> None:
    async def main() -> None:
        async with serving() as (service, _):
            routes = Routes.of(service)
            assert json.dumps(service.identity.name) in Metrics(routes).text().decode()

    asyncio.run(main())
