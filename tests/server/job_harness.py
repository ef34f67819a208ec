"""A server of several processes, and a client of its."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc
from sharding import mesh_size, parse_mesh
from tests.sharding.jobs import free_port, job

PROMPT = "Once upon a time"
MAX_MODEL_LEN = 500
ENDS_WITHIN = 10.0
"""Seconds after a process is lost."""


def request(max_tokens: int) -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=PROMPT, params=params)


@asynccontextmanager
async def serving(
    folder: Path, mesh: str = "tensor=2", host: str = "127.0.0.1"
) -> AsyncIterator[tuple[list[subprocess.Popen[str]], Any]]:
    """The processes, one a device, the leader first, once it says that it is ready; and a client of its door
    at `host`."""
    port = free_port()
    sizes = ["--num-slots", "2", "--max-model-len", str(MAX_MODEL_LEN), "--max-chunk", "16"]
    arguments = ["serve", str(folder), *sizes, "--mesh", mesh, "--host", host, "--grpc-port", str(port)]
    with job("jaxserve", arguments, mesh_size(parse_mesh(mesh))) as members:
        output = members[0].stdout
        assert output is not None
        while (line := await asyncio.to_thread(output.readline)) != "ready\n":
            if not line:
                for member in members:
                    member.kill()
                raise AssertionError("\n".join(member.communicate()[1] for member in members))
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            yield members, engine_pb2_grpc.EngineStub(channel)


async def tokens_of(call: Any) -> list[int]:
    return [token async for event in call for token in event.delta.token_ids]


def last_words(member: subprocess.Popen[str]) -> list[str]:
    """What a process that has ended said of it."""
    assert member.stderr is not None
    return [line for line in member.stderr.read().splitlines() if line.startswith("jaxserve: ")]
