"""Chat templates: untrusted Jinja that came with a model, in a sandbox set up as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
"""`role`, and `content` as a string or a list of text parts; further keys go to the template as they are."""

_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training masks; here its body is just rendered.

    It stays a scope of its own, as in transformers: what is set inside does not leak.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. Raises ValueError if its source is not valid Jinja."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the text that the model was trained on.

        `tools` are JSON schemas of functions; `variables` reach the template by name. Raises ValueError
        for a message that is not one, for one of an unusual role that the template passes over in silence,
        and with the template's own words when it refuses the conversation.
        """
        checked = [_check_message(index, message) for index, message in enumerate(messages)]
        if not checked:
            raise ValueError("a chat needs at least one message")
        try:
            rendered = self._template.render(
                messages=checked,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error.message}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"the chat template fails on this conversation: {error}") from error
        _check_nobody_is_passed_over(checked, rendered)
        return rendered


def _check_message(index: int, message: Message) -> dict[str, Any]:
    """A copy of the message for the template, without keys that are None and with its text in one piece."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {index} is {message!r}; expected a mapping with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {index} has role {role!r}; expected a non-empty string")
    checked = {key: value for key, value in message.items() if value is not None}
    if "content" in checked:
        checked["content"] = _check_content(index, checked["content"])
    elif "tool_calls" not in checked:
        raise ValueError(f"message {index} ({role}) has no content")
    return checked


def _check_nobody_is_passed_over(messages: Sequence[Mapping[str, Any]], rendered: str) -> None:
    """A template knows best what to leave out of the usual roles, but a mistyped one it leaves out whole."""
    for index, message in enumerate(messages):
        if message["role"] not in _USUAL_ROLES and message.get("content", "").strip() not in rendered:
            raise ValueError(
                f"message {index} has role {message['role']!r}, which the chat template passes over; usual "
                f"roles are {', '.join(_USUAL_ROLES)}"
            )


def _check_content(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "\n".join(_check_part(index, part) for part in content)
    raise ValueError(f"message {index} has content {content!r}; expected a string or a list of text parts")


def _check_part(index: int, part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise ValueError(
                f'message {index} has the content part {part!r}; expected {{"type": "text", "text": ...}}'
            )
