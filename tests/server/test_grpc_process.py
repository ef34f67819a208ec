"""The serving process: signals, draining, failure, exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx

from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc
from tests.server.grpc_harness import failure
from tests.server.harness import ENDLESS, GREEDY

ROOT = Path(__file__).resolve().parents[2]


def request(max_tokens: int = ENDLESS.max_tokens) -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text="hello", params=params)


@asynccontextmanager
async def running(
    *arguments: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any, httpx.AsyncClient]]:
    """A server in a process of its own, and a client of each door."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.server.fake_server", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        address, url = (await process.stdout.readline()).decode().split()
        async with grpc.aio.insecure_channel(address) as channel, httpx.AsyncClient(base_url=url) as http:
            yield process, engine_pb2_grpc.EngineStub(channel), http
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def begin(stub: Any) -> Any:
    """A long answer that has begun."""
    call = aiter(stub.Generate(request()))
    await anext(call)
    return call


def test_a_signal_drains_and_the_process_exits_with_zero() -> None:
    async def main() -> None:
        async with running() as (process, stub, http):
            call = await begin(stub)
            assert (await http.get("/ready")).status_code == 200
            process.send_signal(signal.SIGTERM)
            while (await stub.GetLoad(pb.GetLoadRequest())).draining is False:
                await asyncio.sleep(0.01)
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
            refused = await failure(stub.Generate(request(GREEDY.max_tokens)))
            assert refused.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in (refused.details() or "")
            assert [r async for r in call][-1].final.usage.completion_tokens == 100
            assert await process.wait() == 0

    asyncio.run(main())


def test_what_outlasts_the_drain_ends_as_unavailable() -> None:
    async def main() -> None:
        async with running("never", "0.1") as (process, stub, _):
            call = await begin(stub)
            process.send_signal(signal.SIGINT)
            error = await failure(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert await process.wait() == 0

    asyncio.run(main())


def test_a_second_signal_stops_at_once() -> None:
    async def main() -> None:
        async with running() as (process, stub, _):
            call = await begin(stub)
            process.send_signal(signal.SIGTERM)
            while (await stub.GetLoad(pb.GetLoadRequest())).draining is False:
                await asyncio.sleep(0.01)
            before = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
            assert await process.wait() == 130
            assert time.monotonic() - before < 0.9

    asyncio.run(main())


def test_a_failing_device_ends_every_stream_and_the_process() -> None:
    async def main() -> None:
        async with running("30") as (process, stub, _):
            calls = [stub.Generate(request()) for _ in range(3)]
            for error in await asyncio.gather(*map(failure, calls)):
                assert error.code() is grpc.StatusCode.INTERNAL
            assert await process.wait() == 1

    asyncio.run(main())
