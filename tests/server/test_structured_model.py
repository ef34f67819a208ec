"""Answers of a real, tiny model that are held to a form, through every door."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("llguidance", reason="needs the server extra")
openai = pytest.importorskip("openai", reason="needs the official client")

from jaxserve.async_engine import Engine  # noqa: E402
from jaxserve.engine.build import EngineOptions  # noqa: E402
from jaxserve.loop import HostLoop  # noqa: E402
from jaxserve.opened_model import make_loop, open_model  # noqa: E402
from server.core import Routes, Service, identify  # noqa: E402
from server.grpc_server import GrpcDoor, GrpcOptions  # noqa: E402
from server.proto.jaxserve.v1 import engine_pb2 as pb  # noqa: E402
from server.proto.jaxserve.v1 import engine_pb2_grpc  # noqa: E402
from tests.server.http.running import HttpServer, http_server  # noqa: E402

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "done": {"type": "boolean"},
    },
    "required": ["colour", "count", "done"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("paint", "mix")]
HOSTILE = {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(12, 32)]}
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
ASKED = {"model": "stories", "seed": 5, "max_tokens": 200}


def without_blanks(server: HttpServer) -> dict[str, Any]:
    """What to ask of a tiny model, which else says little more than blanks between JSON's tokens."""
    tokenizer = server.service.tokenizer
    blank = [
        i for i in range(tokenizer.vocab_size) if any(byte in b" \n\r\t" for byte in tokenizer.token_bytes[i])
    ]
    return ASKED | {"logit_bias": {str(i): -100 for i in blank}}


@asynccontextmanager
async def stories(folder: Path) -> AsyncIterator[tuple[Service, HostLoop]]:
    model = open_model(folder)
    model.tokenizer.chat_templates["default"] = TEMPLATE
    device = model.build_engine(EngineOptions(num_slots=2, max_model_len=256, max_chunk=16))
    loop = make_loop(device, model.tokenizer)
    engine = Engine(loop)
    identity = identify("stories", "stories", model, device.config, "cpu")
    try:
        yield Service(identity, model.tokenizer, engine), loop
    finally:
        engine.close()
    loop.check_integrity()


@pytest.fixture(scope="module")
def server(shared_data: Path) -> Iterator[HttpServer]:
    folder = shared_data / "models" / "stories260K" / "hf"
    with http_server(open_service=functools.partial(stories, folder), patience=120) as running:
        yield running


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def check(answer: str) -> None:
    found = json.loads(answer)
    assert set(found) == {"colour", "count", "done"}
    assert found["colour"] in ("red", "green")
    assert found["count"] in range(10)
    assert isinstance(found["done"], bool)


def test_json_schema(server: HttpServer, client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    for temperature in (0, 1):
        asked = without_blanks(server) | {"messages": MESSAGES, "temperature": temperature}
        asked["response_format"] = form
        (choice,) = client.chat.completions.create(**asked).choices
        check(choice.message.content)
        assert choice.finish_reason == "stop"
        chunks = client.chat.completions.create(stream=True, **asked)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == choice.message.content


def test_required_and_named_calls(server: HttpServer, client: openai.OpenAI) -> None:
    asked = without_blanks(server) | {"messages": MESSAGES, "tools": TOOLS}
    (choice,) = client.chat.completions.create(
        tool_choice="required", parallel_tool_calls=False, **asked
    ).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name in ("paint", "mix")
    check(call.function.arguments)
    named = {"type": "function", "function": {"name": "mix"}}
    (choice,) = client.chat.completions.create(tool_choice=named, **asked).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "mix"
    check(call.function.arguments)


@pytest.mark.parametrize(
    ("form", "grammar", "pattern"),
    [
        ({"regex": "(ab|c){3}"}, pb.Grammar(regex="(ab|c){3}"), "(ab|c){3}"),
        ({"choice": ["yes", "no"]}, pb.Grammar(choice=pb.Choices(texts=["yes", "no"])), "yes|no"),
        (
            {"grammar": 'root ::= "x" [0-9] "y"'},
            pb.Grammar(ebnf='root ::= "x" [0-9] "y"'),
            "x[0-9]y",
        ),
    ],
)
def test_every_form_over_both_doors_gives_the_same_answer(
    server: HttpServer, client: openai.OpenAI, form: dict[str, Any], grammar: pb.Grammar, pattern: str
) -> None:
    prompt = "Once upon a time"
    (choice,) = client.completions.create(
        prompt=prompt, extra_body={"structured_outputs": form}, **ASKED
    ).choices
    assert re.fullmatch(pattern, choice.text)
    assert choice.finish_reason == "stop"

    async def ask() -> str:
        door = GrpcDoor(Routes.of(server.service), GrpcOptions())
        async with grpc.aio.insecure_channel(await door.start()) as channel:
            params = pb.SamplingParams(seed=5, max_tokens=200, grammar=grammar)
            stub: Any = engine_pb2_grpc.EngineStub(channel)
            stream = stub.Generate(pb.GenerateRequest(text=prompt, params=params))
            text = "".join([one.delta.text async for one in stream])
        await door.stop(0)
        return text

    assert asyncio.run_coroutine_threadsafe(ask(), server.event_loop).result(30) == choice.text


def test_a_hostile_schema_is_refused_while_others_are_answered(
    server: HttpServer, client: openai.OpenAI
) -> None:
    refusals: list[Exception] = []

    def attack() -> None:
        try:
            client.completions.create(prompt="x", extra_body={"guided_json": HOSTILE}, **ASKED)
        except openai.BadRequestError as error:
            refusals.append(error)

    attacker = threading.Thread(target=attack)
    attacker.start()
    num_answers = 0
    while attacker.is_alive():
        client.completions.create(prompt="x", **ASKED | {"max_tokens": 4})
        num_answers += 1
    attacker.join()
    (refusal,) = refusals
    assert "json_schema" in str(refusal)
    assert num_answers > 3
