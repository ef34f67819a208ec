"""A client that goes frees what its request holds within a step: counted step by step, however it goes."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc.aio
import httpx
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from jaxserve.plan import EngineLimits, StepHandle, StepResult
from server.core import GenerateRequest, Routes, Service, Status
from server.grpc_server import GrpcDoor, GrpcOptions
from server.http_door import HttpDoor
from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc
from tests.fake_engine import FakeEngine
from tests.fake_model import fake_limits
from tests.server.harness import ENDLESS, serving

PROMPT = "a prompt that fills several pages of its own"
STEPS_BEFORE = 8
NATIVE = pb.GenerateRequest(
    text=PROMPT, params=pb.SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
)
VLLM = vllm_engine_pb2.GenerateRequest(
    text=PROMPT,
    stream=True,
    sampling_params=vllm_engine_pb2.SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
)
BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "ignore_eos": True}


class SteppedEngine(FakeEngine):
    """Finishes as many steps as it is allowed to."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(limits)
        self._changed = threading.Condition()
        self._permits = 0
        self._asking = False

    def allow(self, num_steps: int) -> None:
        with self._changed:
            self._permits += num_steps
            self._changed.notify()

    def stands(self) -> bool:
        """Whether it waits for a permit."""
        with self._changed:
            return self._asking and not self._permits

    def collect(self, handle: StepHandle) -> StepResult:
        with self._changed:
            self._asking = True
            assert self._changed.wait_for(lambda: self._permits > 0, 30)
            self._permits -= 1
            self._asking = False
        return super().collect(handle)


class Scene:
    """Two requests on the way, one of whose clients is about to go."""

    def __init__(self, device: SteppedEngine, service: Service, grpc_address: str, url: str) -> None:
        self.device = device
        self.service = service
        self.grpc_address = grpc_address
        self.url = url

    async def move(self, num_steps: int) -> None:
        """Let so many steps come to their end."""
        self.device.allow(num_steps)
        await self.until(self.device.stands)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.002)

    @property
    def free_pages(self) -> int:
        return self.service.engine.snapshot().num_free_pages[0]


Leaving = Callable[[Scene], AbstractAsyncContextManager[None]]
"""A client: within the context it has begun to read, at its end it goes."""


@asynccontextmanager
async def native_cancel(scene: Scene) -> AsyncIterator[None]:
    async with grpc.aio.insecure_channel(scene.grpc_address) as channel:
        call: Any = engine_pb2_grpc.EngineStub(channel).Generate(NATIVE)
        await call.read()
        yield
        call.cancel()
        await was_noticed(scene)


@asynccontextmanager
async def vllm_cancel(scene: Scene) -> AsyncIterator[None]:
    async with grpc.aio.insecure_channel(scene.grpc_address) as channel:
        call: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(VLLM)
        await call.read()
        yield
        call.cancel()
        await was_noticed(scene)


@asynccontextmanager
async def batch_cancel(scene: Scene) -> AsyncIterator[None]:
    async with grpc.aio.insecure_channel(scene.grpc_address) as channel:
        batch = pb.GenerateBatchRequest(requests=[NATIVE])
        call: Any = engine_pb2_grpc.EngineStub(channel).GenerateBatch(batch)
        reading = asyncio.ensure_future(call.read())
        yield
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await was_noticed(scene)


@asynccontextmanager
async def grpc_disconnect(scene: Scene) -> AsyncIterator[None]:
    channel = grpc.aio.insecure_channel(scene.grpc_address)
    call: Any = engine_pb2_grpc.EngineStub(channel).Generate(NATIVE)
    await call.read()
    yield
    await channel.close()
    await was_noticed(scene)


@asynccontextmanager
async def http_stream_disconnect(scene: Scene) -> AsyncIterator[None]:
    async with (
        httpx.AsyncClient(base_url=scene.url) as client,
        client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer,
    ):
        lines = answer.aiter_lines()  # Kept: with its last reader the answer would be closed.
        await anext(lines)
        yield
        await answer.aclose()
    await was_noticed(scene)


@asynccontextmanager
async def http_disconnect(scene: Scene) -> AsyncIterator[None]:
    async with httpx.AsyncClient(base_url=scene.url) as client:
        asking = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
        yield
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await was_noticed(scene)


@asynccontextmanager
async def dropped_stream(scene: Scene) -> AsyncIterator[None]:
    generation = await scene.service.generate(GenerateRequest(text=PROMPT, params=ENDLESS))
    await anext(generation)
    yield
    del generation
    gc.collect()


async def was_noticed(scene: Scene) -> None:
    """The door has told the service, before the device moves on."""
    await scene.until(lambda: scene.service.statistics.num_failed[Status.CANCELLED] == 1)


@asynccontextmanager
async def scene_of(device: SteppedEngine) -> AsyncIterator[Scene]:
    async with serving(device) as (service, _):
        routes = Routes.of(service)
        doors = [GrpcDoor(routes, GrpcOptions()), HttpDoor(routes)]
        addresses = [await door.start() for door in doors]
        bystander = await service.generate(GenerateRequest(text="x", params=ENDLESS))
        try:
            yield Scene(device, service, *addresses)
        finally:
            await bystander.aclose()
            device.allow(200)
            for door in doors:
                await door.stop(0)


@pytest.mark.parametrize(
    "leaving",
    [
        native_cancel,
        vllm_cancel,
        batch_cancel,
        grpc_disconnect,
        http_stream_disconnect,
        http_disconnect,
        dropped_stream,
    ],
)
def test_after_its_client_has_gone_a_request_is_in_one_step_more_at_most(leaving: Leaving) -> None:
    async def main() -> None:
        device = SteppedEngine(fake_limits())
        async with scene_of(device) as scene:

            async def begin() -> None:
                await scene.until(lambda: scene.service.engine.num_open == 2)
                await scene.move(STEPS_BEFORE)

            beginning = asyncio.ensure_future(begin())
            async with leaving(scene):
                await beginning
                slot = device.loads[1].slot
                num_plans, num_free = len(device.plans), scene.free_pages
                assert slot in device.plans[-1].slots
            await scene.move(3)  # Two were in flight, and one has been planned since.
            later = [plan for plan in device.plans[num_plans:] if slot in plan.slots]
            assert len(later) <= 1
            held = -(-len(device.loads[1].tokens) // device.limits.page_size)
            assert held > 10
            assert scene.free_pages >= num_free + held - 1  # The bystander may have taken one meanwhile.

    asyncio.run(main())
