"""Tools through the official OpenAI client, unmodified, the model's answers written beforehand."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the server extra")
openai = pytest.importorskip("openai", reason="needs the official client")

from jaxserve.plan import Grammar  # noqa: E402
from server.command import TOOL_PARSERS  # noqa: E402
from server.http.options import HttpOptions  # noqa: E402
from server.http.tool_speech import TOOL_PARSER_NAMES  # noqa: E402
from tests.fake_model import TEMPLATE  # noqa: E402
from tests.server.http.running import http_server  # noqa: E402
from tests.server.scripted import Script, scripted_serving  # noqa: E402

HERMES = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}<{{ call.function.name }}:{{ call.function.arguments.x }}>{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}"
)
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")
USER = {"role": "user", "content": "hi"}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


TOOLS = [tool("add", {"type": "object", "properties": {"x": {"type": "integer"}}}), tool("look")]
ANSWER = (
    'Well.\n<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>\n'
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
)
CALLS = [("add", '{"x": 1}'), ("look", "{}")]
REQUIRED = '[{"name": "add", "parameters": {"x": 1}}, {"name": "look", "parameters": {}}]'


class Served:
    """A client of a server, and the script of its model."""

    def __init__(self, client: openai.OpenAI, script: Script) -> None:
        self.client = client
        self.script = script

    def ask(self, answer: str, size: int = 1000, **asked: Any) -> Any:
        """The answer of a model that says so many characters with each token."""
        self.script.answer = [answer[at : at + size] for at in range(0, len(answer), size)]
        asked = {"messages": [USER], "tools": TOOLS} | asked
        return self.client.chat.completions.create(model="fake", **asked)

    def stream_as_it_comes(self, pieces: Sequence[str | threading.Event], **asked: Any) -> Iterator[Any]:
        """Deltas of a streamed answer as they arrive, a piece with each token."""
        self.script.answer = pieces
        chunks = self.client.chat.completions.create(
            model="fake", messages=[USER], tools=TOOLS, stream=True, **asked
        )
        return (choice for chunk in chunks for choice in chunk.choices)

    def stream(self, answer: str, size: int, **asked: Any) -> list[Any]:
        """Deltas and ends of a streamed answer, up to the usage."""
        return [choice for chunk in self.ask(answer, size, stream=True, **asked) for choice in chunk.choices]


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    yield from serve(HERMES)


@pytest.fixture(scope="module")
def mistral() -> Iterator[Served]:
    yield from serve(MISTRAL)


def serve(template: str, options: HttpOptions | None = None) -> Iterator[Served]:
    script = Script()
    open_service = functools.partial(scripted_serving, script, template)
    with (
        http_server(options=options, open_service=open_service) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(client, script)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def gathered(choices: list[Any]) -> tuple[str, list[dict[str, str]], str]:
    """Content, calls and finish reason of a stream, put together as clients do it."""
    content, calls, ends = "", [], []
    for choice in choices:
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.id is not None:
                assert part.index == len(calls)
                assert part.type == "function"
                calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
            else:
                assert part.function.name is None
            calls[part.index]["arguments"] += part.function.arguments
        if choice.finish_reason is not None:
            ends.append(choice.finish_reason)
    (end,) = ends
    return content, calls, end


def test_calls_of_the_model_s_own_choice(hermes: Served) -> None:
    answer = hermes.ask(ANSWER)
    (choice,) = answer.choices
    assert choice.message.content == "Well."
    assert calls_of(choice.message) == CALLS
    assert choice.finish_reason == "tool_calls"
    first, second = choice.message.tool_calls
    assert first.id != second.id
    assert first.id.startswith("call_")
    assert first.type == "function"
    assert json.dumps(TOOLS) in hermes.script.prompts[-1]
    assert not hermes.script.params[-1].skip_special_tokens, "a tag may be a special token"
    assert hermes.script.params[-1].grammar is None


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
def test_streamed_calls(hermes: Served, size: int) -> None:
    content, calls, end = gathered(hermes.stream(ANSWER, size))
    assert content == "Well."
    assert [(call["name"], call["arguments"]) for call in calls] == CALLS
    assert len({call["id"] for call in calls}) == 2
    assert end == "tool_calls"


def test_content_streams_before_calls_and_arguments_as_they_come(hermes: Served) -> None:
    content_seen, call_seen = threading.Event(), threading.Event()
    content_end, call_end = len("Well."), ANSWER.index(" 1}")
    pieces = [ANSWER[:content_end], content_seen, ANSWER[content_end:call_end], call_seen, ANSWER[call_end:]]
    content = arguments = ""
    for choice in hermes.stream_as_it_comes(pieces):
        content += choice.delta.content or ""
        arguments += "".join(
            part.function.arguments for part in choice.delta.tool_calls or () if part.index == 0
        )
        if content and not content_seen.is_set():
            assert (content, arguments) == ("Well.", ""), "no call has been said"
            content_seen.set()
        if arguments and not call_seen.is_set():
            assert arguments == '{"x":', "the rest has not been said"
            call_seen.set()
    assert (content, arguments) == ("Well.", '{"x": 1}')
    assert call_seen.is_set()


def test_an_answer_without_calls_is_as_ever(hermes: Served) -> None:
    for text in ("Just this. ", ' <tool_call>{"name": 3}</tool_call>', " "):
        (choice,) = hermes.ask(text).choices
        assert choice.message.content == text
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert gathered(hermes.stream(text, 3)) == (text, [], "stop")


def test_a_call_that_is_cut_off_keeps_what_there_is(hermes: Served) -> None:
    answer = hermes.ask(ANSWER, 10, max_tokens=7)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert calls_of(choice.message) == [("add", '{"x": 1}')]


def test_samples_have_calls_of_their_own(hermes: Served) -> None:
    answer = hermes.ask(ANSWER, 5, n=2)
    assert [calls_of(choice.message) for choice in answer.choices] == [CALLS, CALLS]
    assert len({call.id for choice in answer.choices for call in choice.message.tool_calls}) == 4


def test_one_call_only_where_several_are_not_wanted(hermes: Served) -> None:
    (choice,) = hermes.ask(ANSWER, parallel_tool_calls=False).choices
    assert calls_of(choice.message) == CALLS[:1]
    _, calls, _ = gathered(hermes.stream(ANSWER, 5, parallel_tool_calls=False))
    assert [(call["name"], call["arguments"]) for call in calls] == CALLS[:1]


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_required_calls_are_held_to_their_schema(hermes: Served, size: int) -> None:
    (choice,) = hermes.ask(REQUIRED, size, tool_choice="required").choices
    assert choice.message.content is None
    assert calls_of(choice.message) == CALLS
    assert choice.finish_reason == "tool_calls"
    grammar = hermes.script.params[-1].grammar
    assert grammar.kind == "json_schema"
    assert [one["properties"]["name"] for one in json.loads(grammar.text)["items"]["anyOf"]] == [
        {"const": "add"},
        {"const": "look"},
    ]
    content, calls, end = gathered(hermes.stream(REQUIRED, size, tool_choice="required"))
    assert (content, end) == ("", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls] == CALLS


@pytest.mark.parametrize("size", [1, 1000])
def test_a_named_function_is_called(hermes: Served, size: int) -> None:
    choose = {"type": "function", "function": {"name": "add"}}
    (choice,) = hermes.ask('{"x": 1}', size, tool_choice=choose).choices
    assert calls_of(choice.message) == [("add", '{"x": 1}')]
    assert choice.finish_reason == "tool_calls"
    grammar = hermes.script.params[-1].grammar
    assert json.loads(grammar.text) == TOOLS[0]["function"]["parameters"]
    content, calls, end = gathered(hermes.stream('{"x": 1}', size, tool_choice=choose))
    assert (content, end) == ("", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls] == [("add", '{"x": 1}')]


def test_with_tool_choice_none_the_model_knows_no_tools(hermes: Served) -> None:
    (choice,) = hermes.ask(ANSWER, tool_choice="none").choices
    assert choice.message.content == ANSWER
    assert "look" not in hermes.script.prompts[-1]
    assert hermes.script.params[-1].skip_special_tokens


def test_a_conversation_with_calls_comes_back(hermes: Served) -> None:
    (choice,) = hermes.ask(ANSWER).choices
    sent = choice.message.model_dump(exclude_none=True)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": str(at)}
        for at, call in enumerate(choice.message.tool_calls)
    ]
    hermes.ask("So.", messages=[USER, sent, *results])
    ids = [call.id for call in choice.message.tool_calls]
    assert hermes.script.prompts[-1].endswith(
        f"[user]hi[assistant]Well.<add:1><look:>[tool]0{ids[0]}[tool]1{ids[1]}"
    )
    silent = {"role": "assistant", "content": None, "tool_calls": sent["tool_calls"]}
    hermes.ask("So.", messages=[USER, silent])
    assert hermes.script.prompts[-1].endswith("[assistant]<add:1><look:>")


def test_mistral_s_calls_and_ids(mistral: Served) -> None:
    text = '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1}}]'
    (choice,) = mistral.ask(text).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert len(call.id) == 9
    _, calls, end = gathered(mistral.stream('[TOOL_CALLS]add[ARGS]{"x": 1}', 4))
    assert [(call["name"], call["arguments"], len(call["id"])) for call in calls] == [("add", '{"x": 1}', 9)]
    assert end == "tool_calls"
    choose = {"type": "function", "function": {"name": "add"}}
    (choice,) = mistral.ask('{"x": 1}', tool_choice=choose).choices
    assert len(choice.message.tool_calls[0].id) == 9


def test_a_template_that_knows_no_tools_is_served_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for served in serve(TEMPLATE):
        with caplog.at_level(logging.WARNING, "jaxserve.server"):
            for _ in range(2):
                (choice,) = served.ask(ANSWER).choices
                assert choice.message.content == ANSWER
        (line,) = [record.message for record in caplog.records if "tool calls" in record.message]
        assert "shows the model no tools" in line
        (choice,) = served.ask(REQUIRED, tool_choice="required").choices
        assert calls_of(choice.message) == CALLS


def test_the_operator_has_the_last_word_on_the_format() -> None:
    assert TOOL_PARSERS == TOOL_PARSER_NAMES
    for served in serve(MISTRAL, HttpOptions(tool_parser="hermes")):
        assert calls_of(served.ask(ANSWER).choices[0].message) == CALLS
    for served in serve(HERMES, HttpOptions(tool_parser="none")):
        assert served.ask(ANSWER).choices[0].message.content == ANSWER
    with pytest.raises(ValueError, match="tool_parser 'odd' is none of"):
        HttpOptions(tool_parser="odd")  # type: ignore[arg-type]


def test_tokenize_counts_the_tools(hermes: Served) -> None:
    hermes.ask("x")
    found = hermes.client.post(
        "../tokenize", body={"messages": [USER], "tools": TOOLS}, cast_to=dict[str, Any]
    )
    assert found["count"] == len(hermes.script.prompts[-1])


def test_logprobs_stay_with_their_tokens(hermes: Served) -> None:
    choices = hermes.stream(ANSWER, 10, logprobs=True)
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert len(entries) == len(range(0, len(ANSWER), 10))


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "expected an object"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]", "of type function"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1]", "of another one"),
        ({"tools": [tool("f", [1])]}, "tools[0].function.parameters", "a JSON schema"),
        ({"tools": [tool(f"f{i}") for i in range(513)]}, "tools", "the limit is 512"),
        ({"tools": {}}, "tools", "a list of functions"),
        ({"tool_choice": "maybe"}, "tool_choice", "none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "none of tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"response_format": {"type": "json_object"}}, "tool_choice", "held to a form"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[1].tool_calls[0]",
            "a function with a name",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls", "a list of calls"),
    ],
)
def test_what_is_wrong_is_named(hermes: Served, asked: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        hermes.ask("never said", **asked)
    assert refused.value.param == param
    assert message in refused.value.message


def test_a_grammar_that_cannot_be_followed_is_refused(hermes: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="grammar regex: nothing is like that") as refused:
        hermes.ask("", tools=[], extra_body={"guided_regex": "impossible"})
    assert refused.value.param is None
    hermes.ask("x", tools=[], extra_body={"guided_regex": "x"})
    assert hermes.script.params[-1].grammar == Grammar("regex", "x")
