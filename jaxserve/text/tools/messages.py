"""Messages about tool calls, between OpenAI's shape and what chat templates want."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def for_template(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose tool calls a template can write: arguments as objects, a content even if it is empty.

    Arguments that spell no object stay a text: a model may have written them so, and its client sends
    them back with the conversation. No calls are as none at all.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if not calls:
        return rest
    content = rest.get("content")
    return rest | {"content": "" if content is None else content, "tool_calls": [_call(one) for one in calls]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    if not given:
        return {}
    if not isinstance(given, str):
        return given
    try:
        return parse_object(given)
    except ValueError:
        return given


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else, and for what no template can write again:
    unpaired surrogates, objects nested without end."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value
