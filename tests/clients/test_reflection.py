"""A client that knows nothing of the server but its address, as grpcurl: all else it learns by reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.fake_model import fake_limits
from tests.fake_sequence import expected_answer
from tests.server.harness import GREEDY, TOKENIZER
from tests.server.process_harness import running

GREETING = {"temperature": 0, "max_tokens": GREEDY.max_tokens, "ignore_eos": True}


class Curl:
    """Calls methods by name, with dictionaries for messages."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = descriptor_pool.DescriptorPool(self._database)

    @property
    def services(self) -> Iterable[str]:
        return self._database.get_services()

    def methods(self, service: str) -> list[str]:
        return [method.name for method in self._pool.FindServiceByName(service).methods]

    def call(self, service: str, method: str, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        found = self._pool.FindServiceByName(service).FindMethodByName(method)
        request, response = map(message_factory.GetMessageClass, (found.input_type, found.output_type))
        make = self._channel.unary_stream if found.server_streaming else self._channel.unary_unary
        call = make(
            f"/{service}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        answer = call(json_format.ParseDict(message, request()), timeout=20)
        for one in answer if found.server_streaming else [answer]:
            yield json_format.MessageToDict(one, preserving_proto_field_name=True)


def explore(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        curl = Curl(channel)
        assert {"jaxserve.v1.Engine", "vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"} <= set(
            curl.services
        )
        assert {"Generate", "GenerateBatch", "Tokenize", "ListModels"} <= set(
            curl.methods("jaxserve.v1.Engine")
        )
        (health,) = curl.call("grpc.health.v1.Health", "Check", {"service": "jaxserve.v1.Engine"})
        assert health == {"status": "SERVING"}
        (models,) = curl.call("jaxserve.v1.Engine", "ListModels", {})
        assert models == {"models": [{"name": "fake", "state": "ready"}]}

        ids = TOKENIZER.encode("hello")
        expected = expected_answer(fake_limits(), ids, GREEDY, 0)[0]
        (tokens,) = curl.call("jaxserve.v1.Engine", "Tokenize", {"text": "hello"})
        assert tokens["token_ids"] == ids
        *deltas, last = curl.call("jaxserve.v1.Engine", "Generate", {"text": "hello", "params": GREETING})
        assert [token for one in deltas for token in one["delta"].get("token_ids", [])] == expected
        assert last["final"]["receipt"]["route_reason"] == "default"
        (vllm,) = curl.call(
            "vllm.grpc.engine.VllmEngine", "Generate", {"text": "hello", "sampling_params": GREETING}
        )
        assert vllm["complete"]["output_ids"] == expected
        with pytest.raises(grpc.RpcError, match="'gpt-4' is not served here; served: 'fake'"):
            list(curl.call("jaxserve.v1.Engine", "Generate", {"text": "hello", "model": "gpt-4"}))


def test_everything_can_be_found_out_and_called_by_reflection() -> None:
    async def main() -> None:
        async with running() as served:
            await asyncio.to_thread(explore, served.address)

    asyncio.run(main())
