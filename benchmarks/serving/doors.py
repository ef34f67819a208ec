"""The three ways to ask a server, through clients that others wrote: httpx and grpcio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import grpc.aio
import httpx
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from benchmarks.serving.workload import Prompt
from jaxserve.bench.http_stream import list_models, open_client, stream_completion
from jaxserve.bench.traffic import DoorError, Piece, Usage
from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc

_MAX_MESSAGE_BYTES = 256 * 2**20


class Door(Protocol):
    def ask(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        """The answer in the pieces in which it comes, of which a door may not know the text; once, the usage.

        Raises DoorError if there is none.
        """
        ...


OpenDoor = Callable[[], AbstractAsyncContextManager[Door]]


class HttpDoor:
    """`/v1/completions`, of any server that speaks as OpenAI does."""

    def __init__(self, client: httpx.AsyncClient, model: str, ignore_eos: bool) -> None:
        self._client = client
        self._common = {
            "model": model,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def ask(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        body = {**self._common, "prompt": prompt.content, "max_tokens": prompt.max_tokens}
        return stream_completion(self._client, body)


class NativeDoor:
    """jaxserve.v1.Engine."""

    def __init__(self, channel: grpc.aio.Channel, model: str | None, ignore_eos: bool) -> None:
        self._stub: Any = engine_pb2_grpc.EngineStub(channel)
        self._model = model
        self._ignore_eos = ignore_eos

    async def ask(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        params = pb.SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=self._ignore_eos)
        request = pb.GenerateRequest(model=self._model, params=params)
        if isinstance(prompt.content, str):
            request.text = prompt.content
        else:
            request.token_ids.ids.extend(prompt.content)
        async for response in _answered(self._stub.Generate(request)):
            if response.HasField("delta"):
                yield response.delta.text
            else:
                yield Usage(response.final.usage.prompt_tokens, response.final.usage.completion_tokens)


class VllmDoor:
    """vllm.grpc.engine.VllmEngine, which answers in token ids alone."""

    def __init__(self, channel: grpc.aio.Channel, ignore_eos: bool) -> None:
        self._stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        self._ignore_eos = ignore_eos

    async def ask(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        params = vllm_pb.SamplingParams(
            temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=self._ignore_eos
        )
        request = vllm_pb.GenerateRequest(stream=True, sampling_params=params)
        if isinstance(prompt.content, str):
            request.text = prompt.content
        else:
            request.tokenized.input_ids.extend(prompt.content)
        async for response in _answered(self._stub.Generate(request)):
            if response.HasField("chunk"):
                yield ""
            else:
                yield Usage(response.complete.prompt_tokens, response.complete.completion_tokens)


async def _answered(call: Any) -> AsyncIterator[Any]:
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise DoorError(f"{error.code().name}: {error.details()}") from error


@asynccontextmanager
async def open_http(url: str, model: str | None, ignore_eos: bool) -> AsyncIterator[Door]:
    """`model`: by default the first that the server has. Raises DoorError if it has none."""
    async with open_client(url) as client:
        yield HttpDoor(client, model or (await list_models(client))[0]["id"], ignore_eos)


@asynccontextmanager
async def open_native(address: str, model: str | None, ignore_eos: bool) -> AsyncIterator[Door]:
    """`model`: by default the server's first."""
    async with _channel(address) as channel:
        yield NativeDoor(channel, model, ignore_eos)


@asynccontextmanager
async def open_vllm(address: str, model: str | None, ignore_eos: bool) -> AsyncIterator[Door]:
    """The protocol has no word for a model: the server's first answers, whatever `model` is."""
    async with _channel(address) as channel:
        yield VllmDoor(channel, ignore_eos)


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        address, options=(("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),)
    )
