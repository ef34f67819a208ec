"""A server in a process of its own, and its clients."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc.aio
import httpx

from server.proto.jaxserve.v1 import engine_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Running:
    """`tests.server.fake_server`, and a client of each door."""

    process: asyncio.subprocess.Process
    address: str
    """Of the gRPC door."""
    channel: grpc.aio.Channel
    """To there."""
    stub: Any
    http: httpx.AsyncClient


@asynccontextmanager
async def running(
    *arguments: str, module: str = "tests.server.fake_server", log: IO[bytes] | int = asyncio.subprocess.PIPE
) -> AsyncIterator[Running]:
    """Start a server that logs to a file, or a little to a pipe; kill it if it is still there at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module, *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
    )
    try:
        assert process.stdout is not None
        address, url = (await process.stdout.readline()).decode().split()
        async with grpc.aio.insecure_channel(address) as channel, httpx.AsyncClient(base_url=url) as http:
            yield Running(process, address, channel, engine_pb2_grpc.EngineStub(channel), http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
