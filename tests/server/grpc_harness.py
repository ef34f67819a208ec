"""A gRPC door over the fake engine, and a client's channel to it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from jaxserve.loop import HostLoop
from server.core import Routes, Service
from server.core.tls import TlsFiles
from server.grpc_server import GrpcDoor, GrpcOptions
from server.proto.jaxserve.v1 import engine_pb2_grpc
from tests.fake_engine import FakeEngine
from tests.server.harness import OpenService, serving


@dataclass
class Served:
    """A door that is open."""

    service: Service
    loop: HostLoop
    door: GrpcDoor
    address: str
    channel: grpc.aio.Channel

    @property
    def native(self) -> Any:
        return engine_pb2_grpc.EngineStub(self.channel)

    @property
    def vllm(self) -> Any:
        return vllm_engine_pb2_grpc.VllmEngineStub(self.channel)


@asynccontextmanager
async def grpc_serving(
    device: FakeEngine | None = None,
    *,
    max_waiting: int = 64,
    tls: TlsFiles | None = None,
    tokens: Mapping[str, str] | None = None,
    channel_credentials: grpc.ChannelCredentials | None = None,
    open_service: OpenService | None = None,
) -> AsyncIterator[Served]:
    """Serve on a free port of the loopback; afterwards every page and slot must be free.

    `open_service` instead of a service over `device`.
    """
    open_service = open_service or functools.partial(serving, device, max_waiting=max_waiting)
    async with open_service() as (service, loop):
        door = GrpcDoor(Routes.of(service), GrpcOptions(tls=tls, tokens=tokens))
        address = await door.start()
        if channel_credentials is None:
            channel = grpc.aio.insecure_channel(address)
        else:
            target = address.replace("127.0.0.1", "localhost")
            channel = grpc.aio.secure_channel(target, channel_credentials)
        try:
            async with channel:
                yield Served(service, loop, door, address, channel)
        finally:
            await door.stop(1.0)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error with which a call of either kind ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drained(call)
    return caught.value


async def drained(call: Any) -> Any:
    """The answer of a unary call, or all messages of a stream."""
    if hasattr(call, "__aiter__"):
        return [message async for message in call]
    return await call


def streamed_ids(responses: Sequence[Any], kind: str, index: int = 0) -> list[int]:
    """Token ids of one sample out of the messages that bring them, `kind` being their field."""
    messages = [getattr(response, kind) for response in responses if response.HasField(kind)]
    return [token for message in messages if message.index == index for token in message.token_ids]
