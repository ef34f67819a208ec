"""`tools`, `tool_choice` and `parallel_tool_calls`: which functions an answer may, must or shall not call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.plan import Grammar, SamplingParams
from jaxserve.text.tools import NamedParser, Parser, RequiredParser, arguments_schema, required_schema
from server.http.answers import Json
from server.http.errors import bad_request
from server.http.fields import Fields, shown

MAX_TOOLS = 512
_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class ToolUse:
    """Functions that an answer may call, or must."""

    tools: tuple[Json, ...]
    """As the client gave them, for the chat template."""
    parallel: bool
    """Whether an answer may call several."""
    required: bool = False
    """The answer is calls and nothing else."""
    named: str | None = None
    """The answer is the arguments of this function and nothing else."""

    @property
    def forced(self) -> bool:
        """Whether a grammar forms the answer, and not the model's own idea of a call."""
        return self.required or self.named is not None

    @property
    def grammar(self) -> Grammar:
        """What a forced answer is held to."""
        if self.named is None:
            schema = required_schema(self.tools, parallel=self.parallel)
        else:
            (tool,) = (one for one in self.tools if one["function"]["name"] == self.named)
            schema = arguments_schema(tool)
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))

    def forced_parser(self) -> Parser:
        """For a forced answer."""
        return RequiredParser() if self.named is None else NamedParser(self.named)


def read_tool_use(fields: Fields) -> ToolUse | None:
    """Take what a request says of tools; None where it has none to call.

    Raises ApiError (400) naming the part that is wrong.
    """
    tools = read_tools(fields)
    choice = fields.take("tool_choice", "auto" if tools else "none")
    parallel = fields.flag("parallel_tool_calls", True)
    match choice:
        case "none":
            return None
        case "auto":
            return ToolUse(tools, parallel) if tools else None
        case "required":
            _check_any(tools)
            return ToolUse(tools, parallel, required=True)
        case {"type": "function", "function": {"name": str(name)}}:
            _check_any(tools)
            if all(tool["function"]["name"] != name for tool in tools):
                raise bad_request(f"tool_choice names {shown(name)}, which is none of tools", "tool_choice")
            return ToolUse(tools, parallel, named=name)
    raise fields.wrong(
        "tool_choice",
        choice,
        'none, auto, required or {"type": "function", "function": {"name": ...}}',
    )


def read_tools(fields: Fields) -> tuple[Json, ...]:
    """Take `tools`, functions with names of their own. Raises ApiError (400) naming the wrong part."""
    tools = fields.take("tools", [])
    if not isinstance(tools, list):
        raise fields.wrong("tools", tools, "a list of functions")
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools has {len(tools)} functions; the limit is {MAX_TOOLS}", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{index}]")
        if name in names:
            raise bad_request(f"tools[{index}] has the name {shown(name)} of another one", f"tools[{index}]")
        names.add(name)
    return tuple(tools)


def held_to(params: SamplingParams, use: ToolUse | None) -> SamplingParams:
    """The parameters of an answer that may or must call. Raises ApiError (400) where it must be something
    else, too."""
    if use is None:
        return params
    if params.grammar is not None:
        raise bad_request(
            "tools with an answer that is held to a form: it could not call when it wants to; "
            "set tool_choice to none, or leave the form out",
            "tool_choice",
        )
    if use.forced:
        return replace(params, grammar=use.grammar)
    # The marks of a call are special tokens in some vocabularies, and would be hidden from the parser.
    return replace(params, skip_special_tokens=False)


def _check_any(tools: Sequence[Json]) -> None:
    if not tools:
        raise bad_request("tool_choice needs tools to choose from", "tool_choice")


def _check_tool(tool: Any, where: str) -> str:
    """The name of the tool's function."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad_request(f"{where} is {shown(tool)}; expected an object of type function", where)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function is {shown(function)}; expected an object", f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{where}.function.name is {shown(name)}; expected at most 128 letters, digits and _ - . : /",
            f"{where}.function.name",
        )
    for key, kind, expected in (
        ("parameters", dict, "a JSON schema, an object"),
        ("description", str, "a string"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise bad_request(
                f"{where}.function.{key} is {shown(value)}; expected {expected}", f"{where}.function.{key}"
            )
    return name
