"""A conversation of the native protocol, as a chat template sees it."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict

from jaxserve.text import Message
from jaxserve.text.tools import for_template, parse_object
from server.core import ServiceError, Status
from server.proto.jaxserve.v1 import engine_pb2 as pb


def read_messages(conversation: pb.Conversation) -> list[Message]:
    """The messages."""
    return [for_template(_message(message)) for message in conversation.messages]


def read_variables(conversation: pb.Conversation) -> dict[str, Any]:
    """Further variables of the template, tools among them. Raises ServiceError for one that is no object."""
    variables = MessageToDict(conversation.template_variables)
    if conversation.tools:
        variables["tools"] = [_tool(index, text) for index, text in enumerate(conversation.tools)]
    return variables


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    found |= {name: getattr(message, name) for name in ("name", "tool_call_id") if message.HasField(name)}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return found


def _tool(index: int, text: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as error:
        raise ServiceError(
            Status.INVALID_ARGUMENT, f"conversation.tools[{index}] is no JSON object: {error}"
        ) from error
