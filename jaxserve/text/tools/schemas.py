"""JSON schemas of answers that are tool calls and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ANY_OBJECT = {"type": "object", "properties": {}}
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value is an object of schemas by name."""
_PLAIN_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose value is no schema, whatever it looks like."""

Json = Mapping[str, Any]


def arguments_schema(tool: Json) -> Json:
    """What the arguments of one of OpenAI's `tools` must be."""
    return tool["function"].get("parameters") or _ANY_OBJECT


def required_schema(tools: Sequence[Json], *, parallel: bool = True) -> Json:
    """A list of at least one call, `{"name": ..., "parameters": {...}}`, exactly one without `parallel`."""
    calls = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(tool, f"#/items/anyOf/{i}") for i, tool in enumerate(tools)]},
    }
    return calls if parallel else calls | {"maxItems": 1}


def _call_schema(tool: Json, place: str) -> Json:
    parameters = _moved(arguments_schema(tool), f"{place}/properties/parameters")
    return {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema as a part of another, at this JSON pointer: its references to itself follow it there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value.removeprefix("#")
    if key in _PLAIN_VALUES:
        return value
    if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: _moved(one, place) for name, one in value.items()}
    return _moved(value, place)
