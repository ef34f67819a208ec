"""Which format of tool calls a model speaks, by its chat template."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tools.parser import ToolCallParser
from jaxserve.text.tools.parsers import (
    HERMES_TAG,
    MISTRAL_TAG,
    HermesParser,
    Llama3Parser,
    MistralParser,
)

_ALPHANUMERIC = string.ascii_letters + string.digits


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates refuse any other length."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing tool calls."""

    name: str
    make_parser: Callable[[], ToolCallParser]
    make_id: Callable[[], str] = _long_id
    """A fresh id of a call, as the chat templates of this format take it."""


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat("hermes", HermesParser),
        ToolFormat("llama3", Llama3Parser),
        ToolFormat("mistral", MistralParser, _short_id),
    )
}

_OTHER_CALLS = ("<function=", "<arg_key>")
"""Models that write something else between Hermes' tags."""


def new_call_id(tool_format: ToolFormat | None) -> str:
    """A fresh id of a call, for the format or for none."""
    return _long_id() if tool_format is None else tool_format.make_id()


def shows_tools(tokenizer: Tokenizer) -> bool:
    """Whether a chat template of the model does anything with tools."""
    return "tools" in _templates(tokenizer)


def detect_tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the model's chat template teaches; None where it teaches none of those known here."""
    templates = _templates(tokenizer)
    if "tools" not in templates:
        return None
    if MISTRAL_TAG in templates:
        return TOOL_FORMATS["mistral"]
    if HERMES_TAG in templates:
        return None if any(mark in templates for mark in _OTHER_CALLS) else TOOL_FORMATS["hermes"]
    if "<|start_header_id|>" in templates and '"parameters"' in templates:
        return TOOL_FORMATS["llama3"]
    return None


def _templates(tokenizer: Tokenizer) -> str:
    names = ("default", "tool_use")
    return "\n".join(tokenizer.chat_templates.get(name, "") for name in names)
