"""Grammars and tools through both gRPC services, the model's answers written beforehand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from jaxserve.async_engine import Engine
from jaxserve.loop import HostLoop
from jaxserve.plan import Grammar
from server.core import Service
from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.fake_engine import FakeEngine
from tests.fake_model import fake_limits
from tests.server.grpc_harness import Served, drained, failure, grpc_serving
from tests.server.harness import IDENTITY, TOKENIZER
from tests.server.scripted import Script, scripted_serving

TEMPLATE = (
    "{% for t in tools %}({{ t.function.name }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}<{{ call.id }} {{ call.function.name }} {{ call.function.arguments.x }}>"
    "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
)
TOOL = json.dumps({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}})


def with_script(main: Callable[[Served, Script], Awaitable[None]]) -> None:
    async def run() -> None:
        script = Script()
        async with grpc_serving(open_service=lambda: scripted_serving(script, TEMPLATE)) as served:
            await main(served, script)

    asyncio.run(run())


NATIVE = [
    (pb.Grammar(json_object=pb.JsonObject()), Grammar("json_object")),
    (pb.Grammar(json_schema='{"type": "object"}'), Grammar("json_schema", '{"type": "object"}')),
    (pb.Grammar(regex="a+"), Grammar("regex", "a+")),
    (pb.Grammar(choice=pb.Choices(texts=["é", "b"])), Grammar("choice", '["é", "b"]')),
    (pb.Grammar(ebnf='root ::= "a"'), Grammar("ebnf", 'root ::= "a"')),
]
VLLM = [
    ({"json_object": True}, Grammar("json_object")),
    ({"json_object": False}, None),
    ({"json_schema": '{"type": "object"}'}, Grammar("json_schema", '{"type": "object"}')),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    (
        {"choice": vllm_engine_pb2.ChoiceConstraint(choices=["é", "b"])},
        Grammar("choice", '["é", "b"]'),
    ),
    ({"grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
]


def native(grammar: pb.Grammar) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", params=pb.SamplingParams(grammar=grammar))


def vllm(constraint: dict[str, Any]) -> vllm_engine_pb2.GenerateRequest:
    params = vllm_engine_pb2.SamplingParams(max_tokens=4, **constraint)
    return vllm_engine_pb2.GenerateRequest(text="hello", sampling_params=params)


def test_every_kind_of_grammar_arrives() -> None:
    async def main(served: Served, script: Script) -> None:
        for message, grammar in NATIVE:
            await drained(served.native.Generate(native(message)))
            assert script.params[-1].grammar == grammar
        for constraint, grammar in VLLM:
            await drained(served.vllm.Generate(vllm(constraint)))
            assert script.params[-1].grammar == grammar

    with_script(main)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (pb.Grammar(), "grammar is empty: expected one of json_object"),
        (pb.Grammar(json_schema=""), "grammar.json_schema is empty"),
        (pb.Grammar(choice=pb.Choices()), "grammar.choice has no text"),
        (pb.Grammar(choice=pb.Choices(texts=["a", ""])), "grammar.choice has no text to choose, or an empty"),
        (pb.Grammar(regex="impossible"), "grammar regex: nothing is like that"),
    ],
)
def test_a_bad_grammar_is_refused_with_a_sentence(grammar: pb.Grammar, message: str) -> None:
    async def main(served: Served, script: Script) -> None:
        error = await failure(served.native.Generate(native(grammar)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in error.details()

    with_script(main)


@pytest.mark.parametrize(
    ("constraint", "code", "message"),
    [
        ({"structural_tag": "{}"}, grpc.StatusCode.UNIMPLEMENTED, "structural_tag: this server holds"),
        ({"regex": ""}, grpc.StatusCode.INVALID_ARGUMENT, "regex is empty"),
        ({"regex": "impossible"}, grpc.StatusCode.INVALID_ARGUMENT, "nothing is like that"),
        (
            {"choice": vllm_engine_pb2.ChoiceConstraint()},
            grpc.StatusCode.INVALID_ARGUMENT,
            "choice has no text",
        ),
    ],
)
def test_a_bad_constraint_is_refused_with_a_sentence(
    constraint: dict[str, Any], code: grpc.StatusCode, message: str
) -> None:
    async def main(served: Served, script: Script) -> None:
        error = await failure(served.vllm.Generate(vllm(constraint)))
        assert error.code() is code
        assert message in error.details()

    with_script(main)


def test_gateways_are_told_that_a_grammar_holds_from_the_first_token() -> None:
    async def main(served: Served, script: Script) -> None:
        found = await served.vllm.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        assert found.constrained_decoding_start == "first_token"

    with_script(main)


def test_an_engine_without_grammars_says_so() -> None:
    @asynccontextmanager
    async def plain() -> AsyncIterator[tuple[Service, HostLoop]]:
        loop = HostLoop(FakeEngine(fake_limits()))
        engine = Engine(loop)
        yield Service(IDENTITY, TOKENIZER, engine), loop
        engine.close()

    async def main() -> None:
        async with grpc_serving(open_service=plain) as served:
            error = await failure(served.native.Generate(native(pb.Grammar(regex="a"))))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "grammar regex" in error.details()

    asyncio.run(main())


def test_a_conversation_with_tools_reaches_the_template() -> None:
    conversation = pb.Conversation(
        messages=[
            pb.ChatMessage(role="user", content="hi"),
            pb.ChatMessage(
                role="assistant", tool_calls=[pb.ToolCall(id="c1", name="add", arguments='{"x": 7}')]
            ),
            pb.ChatMessage(role="tool", content="14", tool_call_id="c1"),
        ],
        tools=[TOOL],
    )

    async def main(served: Served, script: Script) -> None:
        await drained(served.native.Generate(pb.GenerateRequest(conversation=conversation)))
        assert script.prompts[-1] == "(add)[user]hi[assistant]<c1 add 7>[tool]14c1"
        found = await served.native.Tokenize(pb.TokenizeRequest(conversation=conversation))
        assert len(found.token_ids) == len(script.prompts[-1])

    with_script(main)


@pytest.mark.parametrize("tool", ["{", "[]", '{"a": "\\ud800"}', "[" * 100_000])
def test_tools_that_are_no_objects_are_refused(tool: str) -> None:
    conversation = pb.Conversation(messages=[pb.ChatMessage(role="user", content="hi")], tools=[TOOL, tool])

    async def main(served: Served, script: Script) -> None:
        error = await failure(served.native.Generate(pb.GenerateRequest(conversation=conversation)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "conversation.tools[1] is no JSON object" in error.details()

    with_script(main)
