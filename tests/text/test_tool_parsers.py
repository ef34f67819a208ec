"""Tool calls out of text: the same however the text is cut, and nothing lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text import ChatTemplate
from jaxserve.text.tools import (
    TOOL_FORMATS,
    ArgumentsDelta,
    CallStart,
    NamedParser,
    Parser,
    RequiredParser,
    TextDelta,
    ToolEvent,
    for_template,
)

MakeParser = Callable[[], Parser]
PARSERS: dict[str, MakeParser] = {name: one.make_parser for name, one in TOOL_FORMATS.items()} | {
    "required": RequiredParser,
    "named": lambda: NamedParser("f"),
}

ANSWERS = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"a": "x}\\" <tool_call>", "b": [1, {}]}}\n</tool_call>',
        'Let me see. \n<tool_call>{"arguments": {"q": null}, "name": "g"}</tool_call>\n'
        '<tool_call>{"name": "f", "arguments": {}}</tool_call> Done. ',
        'a <tool_call>{"name": 3}</tool_call> b <tool_call>{"name": "f"}</tool_call>',
        '<tool_call><tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '<tool_call>{"name": "f", "arguments": {"a": [1,',
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "name": "g", "parameters": {"b": [2]}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1} oops}</tool_call>',
        "1 < 2 <tool_ca <tool_call",
    ],
    "llama3": [
        '{"name": "f", "parameters": {"a": "é😀\\u00e9"}}',
        ' {"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}} ',
        '<|python_tag|>{"name": "f", "parameters": {}}<|python_tag|>{"name": "g"}; and so on',
        '<|python_tag|>print("{}")',
        '{"city": "Paris", "name": "f", "parameters": {}}',
        'Say {"name": "f", "parameters": {}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "x"}]',
        'Well.[TOOL_CALLS]f{"a": {"b": "}"}}[TOOL_CALLS]g[CALL_ID]abcDEF123[ARGS]{}',
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, 7]',
        "[TOOL_CALLS]no call at all",
        "[TOOL_CALLS[TOOL_CALLS]" + "f" * 300 + "{}",
    ],
    "required": [
        ' [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": "]"}}]\n',
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "para',
        "not what was required",
    ],
    "named": ['{"a": 1}', ""],
}


def parse(parser: Parser, pieces: Iterable[str]) -> list[ToolEvent]:
    """Every event, with those that differ by how the text is cut joined."""
    events: list[ToolEvent] = []
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        last = events[-1] if events else None
        if isinstance(event, CallStart) or type(event) is not type(last):
            events.append(event)
        else:
            assert isinstance(last, TextDelta | ArgumentsDelta)
            events[-1] = type(last)(last.text + event.text)
    return events


def text_of(events: Sequence[ToolEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def calls_of(events: Sequence[ToolEvent]) -> list[tuple[str, Any]]:
    """Names, and arguments as values."""
    calls: list[tuple[str, Any]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ArgumentsDelta):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return [(name, json.loads(arguments)) for name, arguments in calls]


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize(("name", "answer"), [(name, one) for name in ANSWERS for one in ANSWERS[name]])
def test_every_cut_gives_the_same_events(name: str, answer: str) -> None:
    whole = parse(PARSERS[name](), [answer])
    assert parse(PARSERS[name](), list(answer)) == whole
    for place in range(len(answer) + 1):
        assert parse(PARSERS[name](), cut(answer, [place])) == whole


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    '{"name": "f", "arguments": {"a": [1, "}"]}}',
    '{"name": "g", "parameters": {}}',
    '{"parameters": {"x": {}}, "name": "h"}',
    '{"name": "f"}',
    '"arguments": "{\\"a\\": 2}"',
    'f{"a": 1}',
    *'{}[]",:;\\ \nx1é',
    "null",
    "<tool",
]


@given(
    name=st.sampled_from([*TOOL_FORMATS, "required"]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    data=st.data(),
)
def test_random_answers_in_random_pieces(name: str, fragments: list[str], data: st.DataObject) -> None:
    answer = "".join(fragments)
    whole = parse(PARSERS[name](), [answer])
    places = data.draw(st.lists(st.integers(0, len(answer)), max_size=8))
    assert parse(PARSERS[name](), cut(answer, places)) == whole
    if not any(isinstance(event, CallStart) for event in whole):
        assert text_of(whole) == answer


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(
        st.from_regex(r"[a-z_.-]{1,9}", fullmatch=True), st.dictionaries(st.text(), values, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


def write(name: str, made: Sequence[tuple[str, Any]], ascii_only: bool) -> str:
    """Calls as a model of this format writes them."""
    key = "arguments" if name in ("hermes", "mistral") else "parameters"
    objects = [
        json.dumps({"name": function, key: arguments}, ensure_ascii=ascii_only)
        for function, arguments in made
    ]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "llama3":
            return "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case _:
            return f"[{', '.join(objects)}]"


@given(
    name=st.sampled_from([*TOOL_FORMATS, "required"]), made=calls, ascii_only=st.booleans(), data=st.data()
)
def test_calls_are_read_as_they_were_written(
    name: str, made: list[tuple[str, Any]], ascii_only: bool, data: st.DataObject
) -> None:
    answer = write(name, made, ascii_only)
    places = data.draw(st.lists(st.integers(0, len(answer)), max_size=8))
    events = parse(PARSERS[name](), cut(answer, places))
    assert calls_of(events) == made
    assert text_of(events) == ""


@pytest.mark.parametrize(
    ("name", "answer", "text", "made"),
    [
        ("hermes", ANSWERS["hermes"][1], "Let me see. Done. ", [("g", {"q": None}), ("f", {})]),
        ("hermes", ANSWERS["hermes"][2], 'a <tool_call>{"name": 3}</tool_call> b', [("f", {})]),
        ("hermes", ANSWERS["hermes"][3], "<tool_call>", [("f", {"a": 1})]),
        ("hermes", ANSWERS["hermes"][5], "", [("f", {"a": 1})]),
        ("hermes", ANSWERS["hermes"][6], " oops}</tool_call>", [("f", {"a": 1})]),
        ("llama3", ANSWERS["llama3"][2], "; and so on", [("f", {}), ("g", {})]),
        ("mistral", ANSWERS["mistral"][1], "Well.", [("f", {"a": {"b": "}"}}), ("g", {})]),
        ("mistral", ANSWERS["mistral"][2], ", 7]", [("f", {"a": 1})]),
        ("named", ANSWERS["named"][0], "", [("f", {"a": 1})]),
        ("named", ANSWERS["named"][1], "", []),
    ],
)
def test_what_is_text_and_what_is_a_call(name: str, answer: str, text: str, made: Any) -> None:
    events = parse(PARSERS[name](), [answer])
    assert text_of(events) == text
    assert calls_of(events) == made


@pytest.mark.parametrize(
    ("name", "answer"),
    [("llama3", one) for one in ANSWERS["llama3"][3:]]
    + [("mistral", one) for one in ANSWERS["mistral"][3:]]
    + [("hermes", ANSWERS["hermes"][7]), ("required", ANSWERS["required"][2])]
    + [("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'), ("hermes", " \n ")],
)
def test_what_is_no_call_stays_as_it_is(name: str, answer: str) -> None:
    assert parse(PARSERS[name](), [answer]) == [TextDelta(answer)]


def test_a_model_s_own_id_is_handed_on() -> None:
    events = parse(PARSERS["mistral"](), [ANSWERS["mistral"][1]])
    assert [event.id for event in events if isinstance(event, CallStart)] == [None, "abcDEF123"]


def test_arguments_come_as_they_are_written() -> None:
    parser = PARSERS["hermes"]()
    assert parser.push('Hm <tool_call>{"name": "f", ') == [TextDelta("Hm")]
    assert parser.push('"arguments": {"a"') == [CallStart("f"), ArgumentsDelta('{"a"')]
    assert parser.push(': "x') == [ArgumentsDelta(': "x')]
    assert parser.push('"}}</tool_call>') == [ArgumentsDelta('"}')]
    assert parser.finish() == []


TEMPLATES = {
    "Qwen-Qwen3-0.6B": ("hermes", "<|im_start|>assistant\n", "<|im_end|>", 2),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", "assistant<|end_header_id|>\n\n", "<|eot_id|>", 1),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "[/INST]", "</s>", 2),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_parser_reads_what_its_template_writes(shared_data: Path, template: str) -> None:
    folder = shared_data / "tokenizers/llamacpp_vectors/templates"
    name, opening, end, most = TEMPLATES[template]
    made = [("add", {"a": 1, "b": 'two "quoted" é'}), ("look", {})][:most]
    message = {
        "role": "assistant",
        "tool_calls": [
            {"id": f"abcdefgh{i}", "type": "function", "function": {"name": f, "arguments": json.dumps(a)}}
            for i, (f, a) in enumerate(made)
        ],
    }
    rendered = ChatTemplate((folder / f"{template}.jinja").read_text()).render(
        [{"role": "user", "content": "hi"}, for_template(message)],
        add_generation_prompt=False,
        tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        bos_token="<s>",
        eos_token="</s>",
    )
    answer = rendered.rpartition(opening)[2].partition(end)[0]
    events = parse(PARSERS[name](), list(answer))
    assert calls_of(events) == made
