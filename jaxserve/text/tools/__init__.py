"""Tool calls: what the model writes for them, what a template is told of them, what a grammar forces.

Everything is in the shapes of OpenAI's chat API: a tool is `{"type": "function", "function": {"name": ...,
"parameters": <JSON schema>}}`.
"""

from jaxserve.text.tools.formats import (
    TOOL_FORMATS,
    ToolFormat,
    detect_tool_format,
    new_call_id,
    shows_tools,
)
from jaxserve.text.tools.messages import for_template, parse_object
from jaxserve.text.tools.parser import ArgumentsDelta, CallStart, Parser, TextDelta, ToolEvent
from jaxserve.text.tools.parsers import NamedParser, RequiredParser
from jaxserve.text.tools.schemas import arguments_schema, required_schema

__all__ = [
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "CallStart",
    "NamedParser",
    "Parser",
    "RequiredParser",
    "TextDelta",
    "ToolEvent",
    "ToolFormat",
    "arguments_schema",
    "detect_tool_format",
    "for_template",
    "new_call_id",
    "parse_object",
    "required_schema",
    "shows_tools",
]
