"""A server of two processes: the answers of one, and its end when either is lost."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from jaxserve import LLM, SamplingParams
from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc
from tests.sharding.jobs import WAIT, free_port, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = "Once upon a time"
ENDS_WITHIN = 10.0
"""Seconds after a process is lost."""


def arguments(folder: Path, port: int) -> list[str]:
    sizes = ["--num-slots", "2", "--max-model-len", "500", "--max-chunk", "16"]
    return ["serve", str(folder), *sizes, "--mesh", "tensor=2", "--grpc-port", str(port)]


def request(max_tokens: int) -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=PROMPT, params=params)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[list[subprocess.Popen[str]], Any]]:
    """The processes, the leader first, once it says that it is ready; and a client of its."""
    port = free_port()
    with job("jaxserve", arguments(folder, port), 2) as members:
        output = members[0].stdout
        assert output is not None
        while (line := await asyncio.to_thread(output.readline)) != "ready\n":
            if not line:
                for member in members:
                    member.kill()
                raise AssertionError("\n".join(member.communicate()[1] for member in members))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield members, engine_pb2_grpc.EngineStub(channel)


async def tokens_of(call: Any) -> list[int]:
    return [token async for event in call for token in event.delta.token_ids]


def test_it_answers_as_one_process_and_drains(shared_data: Path) -> None:
    folder = shared_data / "models/stories260K/hf"
    with LLM(folder, num_slots=2, max_model_len=500, max_chunk=16, progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        expected = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids

    async def main() -> None:
        async with serving(folder) as (members, stub):
            answers = await asyncio.gather(*(tokens_of(stub.Generate(request(24))) for _ in range(3)))
            assert answers == [list(expected)] * 3
            members[0].send_signal(signal.SIGTERM)
            assert [await asyncio.to_thread(member.wait, WAIT) for member in members] == [0, 0]

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("lost", [1, 0], ids=["follower", "leader"])
def test_the_loss_of_a_process_ends_the_job(shared_data: Path, lost: int, number: signal.Signals) -> None:
    async def main() -> None:
        async with serving(shared_data / "models/stories260K/hf") as (members, stub):
            call = aiter(stub.Generate(request(490)))
            await anext(call)
            left = members[1 - lost]
            started = time.monotonic()
            members[lost].send_signal(number)
            status = await asyncio.to_thread(left.wait, WAIT)
            assert time.monotonic() - started < ENDS_WITHIN
            assert status == 1
            if lost == 0:  # Its own clients hear of a dead leader from gRPC, of a stopped one from nobody.
                members[lost].kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokens_of(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert left.stderr is not None
            lines = [line for line in left.stderr.read().splitlines() if line.startswith("jaxserve: ")]
            assert len(lines) == 1
            assert f"process {lost}" in lines[0]
            assert lines[0].endswith("; the job ends")

    asyncio.run(main())
