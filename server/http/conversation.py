"""A conversation in a body, and what the chat template gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.text import Message
from jaxserve.text.tools import for_template
from server.http.answers import Json
from server.http.errors import bad_request
from server.http.fields import Fields, Neutral, is_nothing, is_one_of, shown
from server.http.requests import ChatPrompt

CONVERSATION_NEUTRAL: Neutral = {
    "continue_final_message": is_one_of(False),
    "add_special_tokens": is_one_of(False),
    "chat_template": is_nothing,
}
"""A conversation becomes a prompt by the model's own template."""


def read_conversation(fields: Fields, tools: Sequence[Json]) -> ChatPrompt:
    """Take `messages` and what else the chat template gets. Raises ApiError (400) naming the wrong part.

    A message has a role and text as content; an assistant's may have tool calls.
    """
    opened = fields.flag("add_generation_prompt", True)
    variables = fields.mapping("chat_template_kwargs") or {}
    variables = variables | {"add_generation_prompt": opened}
    if tools:
        variables["tools"] = list(tools)
    return ChatPrompt(_read_messages(fields), variables)


def _read_messages(fields: Fields) -> list[Message]:
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", messages, "a list of at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_request(f"{where} is {shown(message)}; expected an object with a role", where)
        _check_content(message.get("content"), f"{where}.content")
        _check_tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    return [for_template(message) for message in messages]


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise bad_request(f"{where} is {shown(content)}; expected a string or a list of text parts", where)
    for part in content:
        match part:
            case {"type": "text", "text": str()}:
                continue
            case {"type": str(kind)} if kind != "text":
                raise bad_request(f"{where} has a part of type {shown(kind)}; only text is supported", where)
        raise bad_request(f"{where} has a part {shown(part)}; expected type text and a text", where)


def _check_tool_calls(calls: Any, where: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise bad_request(f"{where} is {shown(calls)}; expected a list of calls", where)
    for index, call in enumerate(calls):
        match call:
            case {"function": {"name": str(), "arguments": str() | dict() | None}}:
                continue
            case {"function": {"name": str(), **rest}} if "arguments" not in rest:
                continue
        raise bad_request(
            f"{where}[{index}] is {shown(call)}; expected a function with a name, and arguments as a string",
            f"{where}[{index}]",
        )
