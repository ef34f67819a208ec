"""What may come to the gRPC door: through a channel, with wrong messages; and past any, with wrong frames."""

from __future__ import annotations

import asyncio
import random
import struct
import time
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb

from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.server.abuse.bodies import spoilt
from tests.server.abuse.sockets import PATIENCE, Attack, exchange

SERVICES = (
    pb.DESCRIPTOR.services_by_name["Engine"],
    vllm_pb.DESCRIPTOR.services_by_name["VllmEngine"],
)
_ENDLESS_METHODS = {"SubscribeKvEvents"}
_PARAMS = pb.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
_ENDLESS = pb.SamplingParams(max_tokens=120, ignore_eos=True, n=2)
_VALID = pb.GenerateRequest(text="hello", params=_PARAMS)
_SEEDS: tuple[Message, ...] = (
    _VALID,
    pb.GenerateBatchRequest(requests=[_VALID, _VALID]),
    pb.TokenizeRequest(text="x" * 300),
    vllm_pb.GenerateRequest(
        text="hello", stream=True, sampling_params=vllm_pb.SamplingParams(max_tokens=5, n=2)
    ),
)
_ODD_REQUESTS: tuple[Message, ...] = (
    pb.GenerateRequest(),
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])),
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 100_000)),
    pb.GenerateRequest(text="x" * 2_000_000),
    pb.GenerateRequest(text="x", request_id="y" * 10_000),
    pb.GenerateRequest(text="x", params=pb.SamplingParams(temperature=float("nan"))),
    pb.GenerateRequest(text="x", params=pb.SamplingParams(n=2**32 - 1)),
    pb.GenerateRequest(text="x", params=pb.SamplingParams(grammar=pb.Grammar(regex="(((("))),
    pb.GenerateRequest(text="x", params=pb.SamplingParams(grammar=pb.Grammar(ebnf="root ::="))),
    pb.GenerateRequest(text="x", params=pb.SamplingParams(grammar=pb.Grammar(json_schema="{"))),
    pb.GenerateRequest(text="x", deadline_seconds=-1.0),
    pb.GenerateRequest(text="x", deadline_seconds=float("nan")),
    pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.ChatMessage(role="\x00")])),
    pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.ChatMessage()], tools=["no JSON"])),
)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS = 1, 4


async def attack_grpc(
    channel: grpc.aio.Channel, address: str, noise: random.Random
) -> grpc.StatusCode | None:
    """One call in some wrong way; how it ended, None where nobody was told.

    Raises AssertionError for an answer that shows what is inside.
    """
    if noise.random() < 0.25:
        host, _, port = address.rpartition(":")
        frames = spoilt(noise, _frames(noise)) if noise.random() < 0.4 else _frames(noise)
        attack = Attack(frames, complete=False, half_close=noise.random() < 0.3)
        assert b"Traceback" not in await exchange(host, int(port), attack, noise)
        return None
    return await noise.choice((_bytes_call, _bytes_call, _odd_call, _cancelled_call))(channel, noise)


async def _bytes_call(channel: grpc.aio.Channel, noise: random.Random) -> grpc.StatusCode:
    """Any method, any bytes, at times leaving in the middle."""
    service = noise.choice(SERVICES)
    method = noise.choice(service.methods)
    seed = noise.choice(_SEEDS).SerializeToString()
    data = noise.randbytes(noise.randrange(200)) if noise.random() < 0.2 else spoilt(noise, seed)
    name = f"/{service.full_name}/{method.name}" if noise.random() < 0.95 else "/no.such/Method"
    leaves = method.name in _ENDLESS_METHODS or noise.random() < 0.2
    leave_after = noise.random() * 0.01 if leaves else None
    return await _call(channel, name, data, method.server_streaming, leave_after)


async def _odd_call(channel: grpc.aio.Channel, noise: random.Random) -> grpc.StatusCode:
    """A message that is one, and makes no sense."""
    data = noise.choice(_ODD_REQUESTS).SerializeToString()
    metadata = ((noise.choice(("traceparent", "authorization", "x-a")), "z" * noise.randrange(3000)),)
    return await _call(channel, "/jaxserve.v1.Engine/Generate", data, True, None, metadata)


async def _cancelled_call(channel: grpc.aio.Channel, noise: random.Random) -> grpc.StatusCode:
    """A long answer, left at any moment."""
    request = pb.GenerateRequest(text="hello", params=_ENDLESS)
    return await _call(
        channel, "/jaxserve.v1.Engine/Generate", request.SerializeToString(), True, noise.random() * 0.03
    )


async def _call(
    channel: grpc.aio.Channel,
    name: str,
    data: bytes,
    streams: bool,
    leave_after: float | None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> grpc.StatusCode:
    make: Any = channel.unary_stream if streams else channel.unary_unary
    start = time.monotonic()
    call = make(name)(data, timeout=PATIENCE, metadata=metadata)
    if leave_after is not None:
        asyncio.get_running_loop().call_later(leave_after, call.cancel)
    try:
        if streams:
            async for _ in call:
                pass
        else:
            await call
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    assert time.monotonic() - start < PATIENCE, f"{name} hangs on {data[:500]!r}"
    details = await call.details() or ""
    assert "Traceback" not in details
    assert ".py" not in details
    return await call.code()


def _frames(noise: random.Random) -> bytes:
    """A connection's first bytes, and some frames that need not fit together."""
    message = noise.choice(_SEEDS).SerializeToString()
    length = noise.choice((len(message), 0, len(message) + 5, 2**31, 2**32 - 1))
    wrapped = struct.pack(">BI", noise.choice((0, 0, 1, 7)), length) + message
    frames = [
        _frame(_SETTINGS, 0, 0, b""),
        _frame(_HEADERS, _END_HEADERS, 1, _head(noise)),
        _frame(_DATA, noise.choice((0, _END_STREAM)), 1, wrapped),
        _frame(_RESET, 0, 1, struct.pack(">I", 8)),
        _frame(_PING, 0, 0, bytes(8)) * noise.choice((1, 200)),
        _frame(_WINDOW, 0, noise.choice((0, 1)), struct.pack(">I", noise.choice((0, 1, 2**31 - 1)))),
        _frame(_GOAWAY, 0, 0, bytes(8)),
        _frame(noise.randrange(256), noise.randrange(256), noise.randrange(9), noise.randbytes(20)),
        b"\xff\xff\xff" + noise.randbytes(6),
    ]
    kept = frames[: noise.randrange(1, len(frames) + 1)]
    if noise.random() < 0.3:
        noise.shuffle(kept)
    return _PREFACE + b"".join(kept)


def lone_call(path: bytes) -> bytes:
    """A connection whose only call has this path."""
    headers = (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")
    rest = (b"te", b"trailers"), (b"content-type", b"application/grpc")
    head = b"".join(b"\x00" + _text(name) + _text(value) for name, value in (*headers, *rest))
    return _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, head)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _head(noise: random.Random) -> bytes:
    """Headers as literals, which need no table (RFC 7541, 6.2.2)."""
    headers = {
        ":method": noise.choice(("POST", "POST", "GET")),
        ":scheme": "http",
        ":path": noise.choice(("/jaxserve.v1.Engine/Generate", "/no.such/Method", "no path", "")),
        ":authority": "x",
        "te": "trailers",
        "content-type": noise.choice(("application/grpc", "application/grpc+json", "text/html")),
        "grpc-timeout": noise.choice(("1S", "0n", "99999999H", "soon")),
        "x-long": "y" * noise.choice((0, 100)),
    }
    return b"".join(b"\x00" + _text(name.encode()) + _text(value.encode()) for name, value in headers.items())


def _text(text: bytes) -> bytes:
    return bytes([len(text)]) + text
