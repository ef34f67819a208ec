"""The serving process: signals, draining, failure, exit status."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import grpc

from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.server.grpc_harness import failure
from tests.server.harness import ENDLESS, GREEDY
from tests.server.process_harness import running


def request(max_tokens: int = ENDLESS.max_tokens) -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text="hello", params=params)


async def begin(stub: Any) -> Any:
    """A long answer that has begun."""
    call = aiter(stub.Generate(request()))
    await anext(call)
    return call


def test_a_signal_drains_and_the_process_exits_with_zero() -> None:
    async def main() -> None:
        async with running() as served:
            process, stub, http = served.process, served.stub, served.http
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
        async with running("never", "0.1") as served:
            process, stub = served.process, served.stub
            call = await begin(stub)
            process.send_signal(signal.SIGINT)
            error = await failure(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert await process.wait() == 0

    asyncio.run(main())


def test_a_second_signal_stops_at_once() -> None:
    async def main() -> None:
        async with running() as served:
            process, stub = served.process, served.stub
            call = await begin(stub)
            process.send_signal(signal.SIGTERM)
            while (await stub.GetLoad(pb.GetLoadRequest())).draining is False:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
            assert await process.wait() == 130

    asyncio.run(main())


def test_a_failing_device_ends_every_stream_and_the_process() -> None:
    async def main() -> None:
        async with running("30") as served:
            process, stub = served.process, served.stub
            calls = [stub.Generate(request()) for _ in range(3)]
            for error in await asyncio.gather(*map(failure, calls)):
                assert error.code() is grpc.StatusCode.INTERNAL
            assert await process.wait() == 1
            assert process.stderr is not None
            assert "the device has gone" in (await process.stderr.read()).decode()

    asyncio.run(main())
