"""What a template is told of tools, which format a model speaks, and what a grammar forces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.text.tools import (
    TOOL_FORMATS,
    arguments_schema,
    detect_tool_format,
    for_template,
    new_call_id,
    required_schema,
    shows_tools,
)
from tests.fake_model import byte_tokenizer


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": 1', '{"a": 1'),
        ("[1]", "[1]"),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_a_template_gets_arguments_as_objects_where_they_are(given: Any, shown: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call(given)]}
    assert for_template(message) == {"role": "assistant", "content": "", "tool_calls": [call(shown)]}


def test_other_messages_stay_as_they_are() -> None:
    for message in ({"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "x", "content": "4"}):
        assert for_template(message) == message
    assert for_template({"role": "assistant", "content": "x", "tool_calls": []}) == {
        "role": "assistant",
        "content": "x",
    }


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("Qwen-Qwen3-0.6B", "hermes"),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral"),
        ("Qwen3.5-4B", None),
        ("GLM-4.6", None),
        ("Kimi-K2-Instruct", None),
        ("google-gemma-2-2b-it", None),
    ],
)
def test_the_template_tells_the_format(shared_data: Path, template: str, name: str | None) -> None:
    folder = shared_data / "tokenizers/llamacpp_vectors/templates"
    tokenizer = byte_tokenizer((folder / f"{template}.jinja").read_text())
    assert detect_tool_format(tokenizer) is (None if name is None else TOOL_FORMATS[name])
    assert shows_tools(tokenizer) == ("gemma" not in template)


def test_a_model_without_a_template_speaks_no_format() -> None:
    assert detect_tool_format(byte_tokenizer(None)) is None
    assert not shows_tools(byte_tokenizer(None))


def test_ids_are_as_the_format_s_templates_take_them() -> None:
    assert len(new_call_id(TOOL_FORMATS["mistral"])) == 9
    assert new_call_id(TOOL_FORMATS["mistral"]).isalnum()
    assert new_call_id(None).startswith("call_")
    assert new_call_id(None) != new_call_id(None)


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


LINKED = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/$defs/A"},
        "$ref": {"type": "string", "default": {"$ref": "#/as/it/is"}},
        "self": {"anyOf": [{"$ref": "#"}, {"$ref": "http://elsewhere/#/x"}]},
    },
    "$defs": {"A": {"type": "integer", "enum": [1, 2]}},
}


def test_references_follow_a_schema_to_its_new_place() -> None:
    schema = required_schema([tool("f", None), tool("g", LINKED)])
    parameters = schema["items"]["anyOf"][1]["properties"]["parameters"]
    place = "#/items/anyOf/1/properties/parameters"
    assert parameters["properties"] == {
        "a": {"$ref": f"{place}/$defs/A"},
        "$ref": {"type": "string", "default": {"$ref": "#/as/it/is"}},
        "self": {"anyOf": [{"$ref": place}, {"$ref": "http://elsewhere/#/x"}]},
    }
    assert arguments_schema(tool("g", LINKED)) is LINKED
    assert arguments_schema(tool("f", None))["type"] == "object"


def test_without_parallel_calls_there_is_one() -> None:
    assert "maxItems" not in required_schema([tool("f", None)])
    assert required_schema([tool("f", None)], parallel=False)["maxItems"] == 1


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ([{"name": "g", "parameters": {"a": 1}}], True),
        ([{"name": "g", "parameters": {"a": 1, "self": {"a": 2}}}, {"name": "f", "parameters": {}}], True),
        ([{"name": "g", "parameters": {"a": 3}}], False),
        ([{"name": "h", "parameters": {}}], False),
        ([{"name": "f", "parameters": 1}], False),
        ([{"name": "f"}], False),
        ([], False),
    ],
)
def test_the_grammar_lets_calls_through_and_nothing_else(answer: Any, fits: bool) -> None:
    llguidance = pytest.importorskip("llguidance", reason="needs the server extra")
    plain = {key: value for key, value in LINKED["properties"].items() if key != "$ref"}
    plain["self"] = {"$ref": "#"}
    schema = required_schema([tool("f", None), tool("g", LINKED | {"properties": plain})])
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(json.dumps(answer))
    assert (matcher.validate_tokens(tokens) == len(tokens)) == fits
