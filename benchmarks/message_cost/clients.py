"""Clients that count: each opens many streams at once and does nothing with what comes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2

from benchmarks.message_cost.server import BARE_METHOD
from server.proto.jaxserve.v1 import engine_pb2

PROMPT = "Say a word."
Count = tuple[int, int]
"""Messages, and bytes of all of them."""


@dataclass(frozen=True)
class Streams:
    """What is asked of a door."""

    num_streams: int
    """Open at the same time."""
    num_tokens: int
    """In each."""


@dataclass(frozen=True)
class Counted:
    """What came."""

    seconds: float
    num_tokens: int
    num_messages: int
    num_bytes: int


Client = Callable[[Streams], Awaitable[Counted]]


async def _count_all(streams: Streams, count_one: Callable[[], Awaitable[Count]]) -> Counted:
    start = time.perf_counter()
    counts = await asyncio.gather(*(count_one() for _ in range(streams.num_streams)))
    return Counted(
        seconds=time.perf_counter() - start,
        num_tokens=streams.num_streams * streams.num_tokens,
        num_messages=sum(messages for messages, _ in counts),
        num_bytes=sum(num_bytes for _, num_bytes in counts),
    )


async def count_grpc(address: str, method: str, request: bytes, streams: Streams) -> Counted:
    """Messages are left as bytes, so that the client costs little and the same for every server."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(method)

        async def count_one() -> Count:
            messages = num_bytes = 0
            async for message in call(request):
                messages += 1
                num_bytes += len(message)
            return messages, num_bytes

        return await _count_all(streams, count_one)


async def count_bare(address: str, size: int, step_seconds: float, streams: Streams) -> Counted:
    request = f"{streams.num_tokens} {size} {step_seconds}".encode()
    return await count_grpc(address, BARE_METHOD, request, streams)


async def count_native(address: str, streams: Streams) -> Counted:
    params = engine_pb2.SamplingParams(temperature=0.0, max_tokens=streams.num_tokens)
    request = engine_pb2.GenerateRequest(text=PROMPT, params=params)
    return await count_grpc(address, "/jaxserve.v1.Engine/Generate", request.SerializeToString(), streams)


async def count_vllm(address: str, streams: Streams) -> Counted:
    params = vllm_engine_pb2.SamplingParams(temperature=0.0, max_tokens=streams.num_tokens)
    request = vllm_engine_pb2.GenerateRequest(text=PROMPT, stream=True, sampling_params=params)
    return await count_grpc(
        address, "/vllm.grpc.engine.VllmEngine/Generate", request.SerializeToString(), streams
    )


async def count_plain(url: str, size: int, streams: Streams) -> Counted:
    """Lines over bare connections."""
    return await _count_connections(url, b"%d %d\n" % (streams.num_tokens, size), b"\n", streams)


async def count_http(url: str, streams: Streams) -> Counted:
    """Server-sent events of a chat, over a connection for each stream."""
    asked = {
        "model": "word",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": streams.num_tokens,
        "stream": True,
    }
    body = json.dumps(asked)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return await _count_connections(url, (head + body).encode(), b"data: ", streams)


async def _count_connections(url: str, request: bytes, mark: bytes, streams: Streams) -> Counted:
    """`mark`: what every message has once."""
    address = urlsplit(url)

    async def count_one() -> Count:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(request)
        messages = num_bytes = 0
        while data := await reader.read(65536):
            messages += data.count(mark)
            num_bytes += len(data)
        writer.close()
        return messages, num_bytes

    return await _count_all(streams, count_one)
