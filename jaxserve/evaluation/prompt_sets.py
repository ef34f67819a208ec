"""Prompt sets: JSONL files, each line a prompt and what a good answer to it is.

A line has its prompt under `messages` (a conversation), `prompt`, `question` or `turns` (of which the first
is asked), and any of: `answer`, to be matched; `schema`, a JSON schema to be met; `instruction_id_list` with
`kwargs`, instructions as in IFEval. `slice` or `category` puts it in a slice of its own within the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.text import Message
from jaxserve.text_lines import text_lines

JsonSchema = dict[str, Any] | bool
_SUFFIXES = (".gz", ".jsonl", ".json")


@dataclass(frozen=True)
class Instruction:
    """Something that can be checked in an answer."""

    name: str
    """As `punctuation:no_comma`."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt, and by what its answer is judged."""

    source: str
    """Where it comes from, as `FILE:LINE`."""
    slice: str
    messages: Sequence[Message]
    answer: str | None = None
    schema: JsonSchema | None = None
    instructions: tuple[Instruction, ...] = ()


def read_prompt_set(path: Path, limit: int | None = None) -> list[Case]:
    """The cases of a file, `.jsonl` or `.jsonl.gz`; the first `limit` of them.

    Raises ValueError, naming file and line, for what is no case, and for a file without any.
    """
    cases: list[Case] = []
    for number, line in enumerate(text_lines(path), start=1):
        if limit is not None and len(cases) >= limit:
            break
        if line.strip():
            source = f"{path}:{number}"
            try:
                cases.append(_case(json.loads(line), source, _stem(path)))
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
    if not cases:
        raise ValueError(f"{path}: holds no prompt")
    return cases


def _stem(path: Path) -> str:
    """A file's name without its endings; the folder's where the name says nothing of its own."""
    name = path.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return path.resolve().parent.name if name in {"test", "question", "input_data"} else name


def _case(line: Any, source: str, stem: str) -> Case:
    if not isinstance(line, dict):
        raise ValueError(f"{line!r} is no JSON object")
    part = _text(line, "slice") or _text(line, "category")
    schema = line.get("schema")
    if schema is not None and not isinstance(schema, dict | bool):
        raise ValueError(f"schema is {schema!r}; expected a JSON schema")
    return Case(
        source=source,
        slice=f"{stem}/{part}" if part else stem,
        messages=_messages(line),
        answer=_text(line, "answer"),
        schema=schema,
        instructions=_instructions(line),
    )


def _text(line: Mapping[str, Any], name: str) -> str | None:
    """A field that is a text, or a number standing for one."""
    value = line.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{name} is {value!r}; expected a text")


def _messages(line: Mapping[str, Any]) -> Sequence[Message]:
    if "messages" in line:
        messages = line["messages"]
        if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
            raise ValueError(f"messages is {messages!r}; expected a list of objects with role and content")
        return messages
    turns = line.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else _text(line, "prompt") or _text(line, "question")
    if not (isinstance(text, str) and text.strip()):
        raise ValueError("no prompt: expected a text under prompt, question or turns, or messages")
    return [{"role": "user", "content": text}]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _instructions(line: Mapping[str, Any]) -> tuple[Instruction, ...]:
    names = line.get("instruction_id_list", [])
    arguments = line.get("kwargs", [{}] * len(names)) if isinstance(names, list) else None
    well_formed = (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and isinstance(arguments, list)
        and len(arguments) == len(names)
        and all(isinstance(one, dict) for one in arguments)
    )
    if not well_formed:
        raise ValueError("expected instruction_id_list, a list of names, and as many objects under kwargs")
    assert isinstance(arguments, list)
    return tuple(
        Instruction(name, {key: value for key, value in one.items() if value is not None})
        for name, one in zip(names, arguments, strict=True)
    )
