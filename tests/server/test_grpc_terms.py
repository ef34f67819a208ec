"""Classes, quotas, deadlines and retries over gRPC: who is let in, and what the others hear."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from jaxserve.scheduling import SchedulerPolicy
from server.grpc_server.status import REASON_METADATA, RETRY_METADATA
from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc
from tests.fake_model import fake_limits
from tests.server.grpc_harness import Served, failure, grpc_serving
from tests.server.harness import SlowEngine, serving

RETRY = (("x-jaxserve-retry", "1"),)


def request(num_tokens: int = 100, **fields: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return pb.GenerateRequest(text="hello", params=params, **fields)


def one_slot(settings: Mapping[str, Any], max_waiting: int = 64) -> Any:
    """A door over one slot of 20 ms a step."""
    return grpc_serving(
        open_service=functools.partial(
            serving,
            SlowEngine(fake_limits(num_slots=1)),
            policy=SchedulerPolicy.from_mapping(settings),
            max_waiting=max_waiting,
        )
    )


async def start(served: Served, num_requests: int, **fields: Any) -> list[Any]:
    """Calls that run or wait, of which the first has a slot."""
    calls = [served.native.Generate(request(**fields))]
    await calls[0].read()
    calls += [served.native.Generate(request(**fields)) for _ in range(num_requests - 1)]
    while served.service.engine.num_open < num_requests:
        await asyncio.sleep(0.001)
    return calls


@dataclass
class Overload:
    """A policy, what is there already, and the request that is too much."""

    settings: Mapping[str, Any]
    num_open: int = 2
    asked: Callable[[], pb.GenerateRequest] = request
    call: dict[str, Any] = field(default_factory=dict[str, Any])


OVERLOADS = {
    "queue_full": Overload({"classes": {"default": {"max_waiting": 1}}}),
    "tokens": Overload({"classes": {"default": {"max_waiting_tokens": 150}}}),
    "kv": Overload({"classes": {"default": {"max_waiting_pools": 0.15}}}),
    "tenant_quota": Overload({"other_tenants": {"max_open": 1}}, num_open=1),
    "rate": Overload({"other_tenants": {"tokens_per_second": 2.0, "burst": 10.0}}, num_open=1),
    "retry_budget": Overload({"retries": {"ratio": 0.0, "at_least": 0}}, call={"metadata": RETRY}),
}


@pytest.mark.parametrize("reason", OVERLOADS)
def test_each_refusal_has_its_reason_and_a_time(reason: str) -> None:
    async def main() -> None:
        case = OVERLOADS[reason]
        async with one_slot(case.settings) as served:
            calls = await start(served, case.num_open)
            error = await failure(served.native.Generate(case.asked(), **case.call))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            told = dict(error.trailing_metadata())
            assert told[REASON_METADATA] == reason
            assert int(told[RETRY_METADATA]) >= 50
            assert "limit" in (error.details() or "")
            stats = await served.native.GetStats(pb.GetStatsRequest())
            assert dict(stats.rejected) == {reason: 1}
            for call in calls:
                call.cancel()

    asyncio.run(main())


def test_a_batch_says_the_reason_too() -> None:
    async def main() -> None:
        async with one_slot({"other_tenants": {"max_open": 1}}) as served:
            calls = await start(served, 1)
            batch = pb.GenerateBatchRequest(requests=[request()])
            (result,) = [one async for one in served.native.GenerateBatch(batch)]
            assert result.error.reason == "tenant_quota"
            assert result.error.retry_after_seconds > 0
            calls[0].cancel()

    asyncio.run(main())


def test_a_deadline_that_will_be_missed_is_refused_and_one_that_passes_in_the_queue_ends() -> None:
    async def main() -> None:
        # The class's own patience must not be what refuses.
        async with one_slot({"classes": {"default": {"max_predicted_wait": 3600.0}}}) as served:
            # Requests that end while others wait teach how fast the queue drains; two seconds do.
            taught = [served.native.Generate(request(num_tokens=2)) for _ in range(48)]
            for call in taught:
                assert [one async for one in call][-1].HasField("final")
            calls = await start(served, 8)
            hopeless = await failure(served.native.Generate(request(deadline_seconds=0.5)))
            assert hopeless.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(hopeless.trailing_metadata())[REASON_METADATA] == "deadline"
            for call in calls:
                call.cancel()

    asyncio.run(main())


def test_a_deadline_that_passes_in_the_queue_ends_the_request_there() -> None:
    async def main() -> None:
        async with one_slot({}) as served:
            calls = await start(served, 1)
            sampled = served.service.engine.snapshot().num_sampled
            late = await failure(served.native.Generate(request(deadline_seconds=0.1)))
            assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "deadline" in (late.details() or "")
            while served.service.engine.num_open > 1:
                await asyncio.sleep(0.001)
            assert served.service.engine.snapshot().num_running == 1
            assert served.service.engine.snapshot().num_sampled > sampled
            calls[0].cancel()

    asyncio.run(main())


def test_classes_are_visible_in_load_and_receipt() -> None:
    async def main() -> None:
        async with one_slot({}) as served:
            calls = await start(served, 2, priority_class="batch")
            load = await served.native.GetLoad(pb.GetLoadRequest())
            classes = {one.name: one for one in load.classes}
            assert list(classes) == ["interactive", "default", "retry", "batch"]
            assert (classes["batch"].running, classes["batch"].waiting) == (1, 1)
            assert classes["batch"].waiting_tokens > 0
            assert classes["default"].running == classes["default"].waiting == 0
            for call in calls:
                call.cancel()
            answered = [one async for one in served.native.Generate(request(2, priority_class="interactive"))]
            assert answered[-1].final.receipt.priority_class == "interactive"

    asyncio.run(main())


def test_the_floor_of_an_urgent_class_is_kept_under_a_flood() -> None:
    async def main() -> None:
        device = SlowEngine(fake_limits(num_slots=4))
        async with grpc_serving(open_service=functools.partial(serving, device)) as served:
            calls = await start(served, 12, priority_class="batch")
            urgent = request(2, priority_class="interactive")
            responses = [one async for one in served.native.Generate(urgent)]
            # Six seconds of flood are ahead of it.
            assert responses[-1].final.timings.queue < 1.0
            for call in calls:
                call.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("way", ["field", "metadata"])
def test_a_retry_is_known_by_its_field_or_its_metadata(way: str) -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            if way == "field":
                call = served.native.Generate(request(2, is_retry=True))
            else:
                call = served.native.Generate(request(2), metadata=RETRY)
            assert [one async for one in call][-1].final.receipt.priority_class == "retry"
            first = served.native.Generate(request(2), metadata=(("x-jaxserve-retry", "0"),))
            assert [one async for one in first][-1].final.receipt.priority_class == "default"

    asyncio.run(main())


def test_grpcs_own_retries_heed_the_delay_and_are_known() -> None:
    retries = {"maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2}
    config = {
        "methodConfig": [
            {"name": [{}], "retryPolicy": retries | {"retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}
        ]
    }

    async def main() -> None:
        async with one_slot({}, max_waiting=0) as served:
            options = (("grpc.service_config", json.dumps(config)),)
            async with grpc.aio.insecure_channel(served.address, options=options) as channel:
                running = served.native.Generate(request(10))
                await running.read()
                call = engine_pb2_grpc.EngineStub(channel).Generate(request(2))
                assert [one async for one in call][-1].final.receipt.priority_class == "retry"
            assert served.service.statistics.num_rejected["queue_full"] >= 1

    asyncio.run(main())


def test_vllms_protocol_names_a_class_in_its_metadata() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            params = vllm_engine_pb2.SamplingParams(max_tokens=2)
            asked = vllm_engine_pb2.GenerateRequest(text="x", sampling_params=params)
            odd = (("x-jaxserve-priority", "gold"),)
            error = await failure(served.vllm.Generate(asked, metadata=odd))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "interactive" in (error.details() or "")
            batch = (("x-jaxserve-priority", "batch"),)
            assert [one async for one in served.vllm.Generate(asked, metadata=batch)]
            assert served.service.statistics.num_requests["batch", "none", "length"] == 1

    asyncio.run(main())
