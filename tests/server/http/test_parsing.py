"""Bodies become calls, and errors become bodies: pure functions, no server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the server extra")

from jaxserve.plan import Grammar, SamplingParams
from server.core import HTTP_CODES, ServiceError, Status
from server.http.chat import read_chat
from server.http.completions import read_completion
from server.http.errors import ApiError, from_service
from server.http.requests import ChatPrompt, TextPrompt, TokensPrompt

MESSAGES = [{"role": "user", "content": "x"}]
SAMPLING = {
    "n": 2,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "allowed_token_ids": [1, 2, 3],
    "bad_token_ids": [4],
    "min_tokens": 2,
    "max_tokens": 5,
    "ignore_eos": True,
    "stop_token_ids": [6],
    "stop": ("a", "b"),
    "include_stop_str_in_output": True,
    "seed": 11,
    "skip_special_tokens": False,
    "prompt_logprobs": 2,
}
"""Everything but what the two endpoints or JSON put differently, and nothing at its default."""


def test_every_sampling_parameter_arrives() -> None:
    body = SAMPLING | {"stop": ["a", "b"], "logit_bias": {"5": -1, "6": 2.5}, "guided_regex": "a+"}
    wanted = SAMPLING | {
        "logit_bias": {5: -1.0, 6: 2.5},
        "logprobs": 3,
        "grammar": Grammar("regex", "a+"),
    }
    chat = read_chat(body | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3})
    completion = read_completion(body | {"prompt": "x", "logprobs": 3})
    assert chat.params == completion.params == SamplingParams(**wanted)
    assert set(wanted) == set(SamplingParams.__dataclass_fields__), "a parameter that no client can set"
    assert not chat.until_full


def test_null_is_absent_and_absent_is_the_library_s_default() -> None:
    nothing = dict.fromkeys(
        [*SAMPLING, "logit_bias", "logprobs", "stream", "stream_options", "tools", "user"]
    )
    completion = read_completion(nothing | {"prompt": "x", "echo": None})
    assert completion.params == SamplingParams(max_tokens=16)
    assert completion == read_completion({"prompt": "x"})
    chat = read_chat(nothing | {"messages": MESSAGES, "max_completion_tokens": None})
    assert chat == read_chat({"messages": MESSAGES})
    assert chat.until_full
    assert chat.params.logprobs is None


def test_a_lone_stop_string_is_one() -> None:
    assert read_completion({"prompt": "x", "stop": "ab"}).params.stop_strings == ("ab",)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", (TextPrompt("a", False),)),
        (["a", "b"], (TextPrompt("a", False), TextPrompt("b", False))),
        ([1, 2], (TokensPrompt([1, 2]),)),
        ([[1, 2], [3]], (TokensPrompt([1, 2]), TokensPrompt([3]))),
    ],
)
def test_prompts(prompt: Any, prompts: Any) -> None:
    assert read_completion({"prompt": prompt, "add_special_tokens": False}).prompts == prompts


def test_a_conversation_and_its_template_s_variables() -> None:
    chat = read_chat({"messages": MESSAGES, "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False})
    assert chat.prompts == (ChatPrompt(MESSAGES, {"a": 1, "add_generation_prompt": False}),)


def test_echo_asks_for_the_prompt_s_logprobs_and_does_not_show_them_twice() -> None:
    call = read_completion({"prompt": "x", "echo": True, "logprobs": 1})
    assert call.params.prompt_logprobs == 1
    assert not call.return_prompt_logprobs


SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, ensure_ascii=False)


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "description": "y", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar("json_schema", SCHEMA_TEXT),
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json": "{}"}}, Grammar("json_schema", "{}")),
        ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        ({"structured_outputs": {"grammar": "x"}}, Grammar("ebnf", "x")),
        (
            {"structured_outputs": {"json_object": True, "disable_fallback": False}},
            Grammar("json_object"),
        ),
    ],
)
def test_an_answer_s_form_is_read_from_every_name_it_has(body: dict[str, Any], grammar: Any) -> None:
    assert read_completion({"prompt": "x"} | body).params.grammar == grammar
    assert read_chat({"messages": MESSAGES} | body).params.grammar == grammar


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "expected an object"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
            "a JSON schema",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
            "does not go with type text",
        ),
        ({"response_format": {"type": "text", "odd": 1}}, "response_format.odd", "unknown parameter"),
        ({"guided_json": "{"}, "guided_json", "a JSON schema"),
        ({"guided_json": "[" * 100_000}, "guided_json", "a JSON schema"),
        ({"guided_regex": ""}, "guided_regex", "is empty"),
        ({"guided_choice": []}, "guided_choice", "a list of strings"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "not empty"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "is empty"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown"),
        (
            {"structured_outputs": {"disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "cannot do",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "structured_outputs.regex and structured_outputs.choice together",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format and guided_regex together",
        ),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=re.escape(message)) as refused:
        read_completion({"prompt": "x"} | body)
    assert refused.value.status == 400
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "echo": True, "logprobs": 1}, "echo"),
        ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"prompt": ["x"] * 257}, "prompt"),
    ],
)
def test_refusals_name_their_parameter(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_completion({"prompt": "x"} | body)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param.rsplit(".", maxsplit=1)[-1] in refused.value.message


def test_every_status_has_an_answer() -> None:
    for status in Status:
        error = from_service(ServiceError(status, "a sentence"))
        body = error.body()["error"]
        assert error.status == HTTP_CODES[status]
        assert body["message"] == "a sentence"
        assert body["code"]
        assert (body["type"] == "server_error") == (error.status >= 500)
        assert ("Retry-After" in error.headers()) == (error.status in (429, 503))


def test_retry_after_is_whole_seconds_and_never_none() -> None:
    for seconds, header in ((0.05, "1"), (1.2, "2"), (60.0, "60"), (None, "1")):
        error = from_service(ServiceError(Status.RESOURCE_EXHAUSTED, "later", seconds))
        assert error.headers() == {"Retry-After": header}


def test_the_library_s_complaint_leads_to_its_parameter() -> None:
    error = from_service(ServiceError(Status.INVALID_ARGUMENT, "logprobs 9 is out of range"))
    assert error.body()["error"]["param"] == "logprobs"
    assert from_service(ServiceError(Status.INVALID_ARGUMENT, "the text is long")).param is None
