"""Malformed, truncated, hostile and cancelled calls: statuses for their callers, nothing for anybody else."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2

from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.fake_model import fake_limits
from tests.server.grpc_harness import Served, grpc_serving, streamed_ids
from tests.server.harness import GREEDY, PacedEngine, expected

NUM_CALLS = 2400
ENDLESS = "SubscribeKvEvents"
"""The one stream that only its subscriber ends."""
SERVICES = (
    pb.DESCRIPTOR.services_by_name["Engine"],
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
)
VALID = pb.GenerateRequest(
    text="hello", params=pb.SamplingParams(temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True)
)
SEEDS: tuple[Message, ...] = (
    VALID,
    pb.GenerateBatchRequest(requests=[VALID, VALID]),
    pb.TokenizeRequest(text="x" * 300),
    vllm_engine_pb2.GenerateRequest(
        text="hello", stream=True, sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=5, n=2)
    ),
)


class QuickEngine(PacedEngine):
    pace = 0.0


def hostile_bytes(noise: random.Random) -> bytes:
    """A message that was valid, with a few bytes changed, cut off or added; or plain noise."""
    if noise.random() < 0.2:
        return noise.randbytes(noise.randrange(200))
    data = bytearray(noise.choice(SEEDS).SerializeToString())
    for _ in range(noise.randrange(4)):
        data[noise.randrange(len(data))] = noise.randrange(256)
    if noise.random() < 0.3:
        del data[noise.randrange(len(data)) :]
    if noise.random() < 0.2:
        data += noise.randbytes(20)
    return bytes(data)


async def hostile_call(served: Served, noise: random.Random) -> grpc.StatusCode:
    """Call any method with any bytes, at times leaving in the middle; return how it ended."""
    service = noise.choice(SERVICES)
    method = noise.choice(service.methods)
    kind: Any = served.channel.unary_stream if method.server_streaming else served.channel.unary_unary
    # No such call may take long: the deadline would show one that hangs.
    call = kind(f"/{service.full_name}/{method.name}")(hostile_bytes(noise), timeout=20)
    if noise.random() < 0.2 or method.name == ENDLESS:
        await asyncio.sleep(noise.random() * 0.01)
        call.cancel()
    try:
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return await call.code()


def test_hostile_calls_end_and_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def well_behaved(served: Served, stop: asyncio.Event) -> int:
        num_answers = 0
        while not stop.is_set():
            responses = [r async for r in served.native.Generate(VALID)]
            assert streamed_ids(responses, "delta") == expected("hello", GREEDY)
            num_answers += 1
        return num_answers

    async def main() -> None:
        noise = random.Random(5)
        async with grpc_serving(QuickEngine(fake_limits()), max_waiting=1000) as served:
            stop = asyncio.Event()
            witness = asyncio.create_task(well_behaved(served, stop))
            codes = set[grpc.StatusCode]()
            for _ in range(NUM_CALLS // 8):
                codes |= set(await asyncio.gather(*(hostile_call(served, noise) for _ in range(8))))
            stop.set()
            assert await witness > 5
            while served.service.engine.num_open:
                await asyncio.sleep(0.001)
            assert grpc.StatusCode.OK in codes
            assert grpc.StatusCode.INVALID_ARGUMENT in codes
            assert not codes & {grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}

    asyncio.run(main())
    assert not [record for record in caplog.records if record.exc_info]
