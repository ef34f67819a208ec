"""A call that breaks grpcio's own serving loop harms nobody else's."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.fake_model import fake_limits
from tests.server.abuse.grpc_attacks import lone_call
from tests.server.abuse.sockets import Attack, exchange
from tests.server.grpc_harness import Served, grpc_serving, streamed_ids
from tests.server.harness import ENDLESS, GREEDY, SlowEngine, expected

NO_UTF8 = b"/jaxserve\xebv1.Engine/Generate"
PATIENCE = 10.0


def request(max_tokens: int | None) -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text="hello", params=params)


async def listen(served: Served, max_tokens: int | None) -> list[int]:
    responses = [response async for response in served.native.Generate(request(max_tokens))]
    return streamed_ids(responses, "delta")


def test_a_path_that_is_no_text_cuts_nobody_off(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with grpc_serving(SlowEngine(fake_limits())) as served:
            listening = asyncio.create_task(listen(served, ENDLESS.max_tokens))
            while not served.service.load().num_running:
                await asyncio.sleep(0.001)
            host, _, port = served.address.rpartition(":")
            for number in range(1, 4):
                attack = Attack(lone_call(NO_UTF8), complete=False)
                await exchange(host, int(port), attack, random.Random(0))
                async with asyncio.timeout(PATIENCE):
                    while len(told(caplog)) < number:
                        await asyncio.sleep(0.001)
                assert await listen(served, GREEDY.max_tokens) == expected("hello", GREEDY)
            assert not listening.done()
            assert await listening == expected("hello", ENDLESS)

    asyncio.run(main())
    for record in told(caplog):
        assert "UnicodeDecodeError" in record.getMessage()
        assert record.exc_info is None


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "broke down" in record.getMessage()]
