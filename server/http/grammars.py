"""What an answer must be: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.plan import Grammar
from server.http.errors import bad_request
from server.http.fields import Fields, is_one_of

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf"}
_STRUCTURED_NEUTRAL = {
    name: is_one_of(False)
    for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
}


def read_grammar(fields: Fields) -> Grammar | None:
    """Take every parameter that gives the answer a form. Raises ApiError (400) for more than one."""
    found = {"response_format": _read_response_format(fields)}
    found |= {name: _read_source(fields, name, kind) for name, kind in _GUIDED.items()}
    found["structured_outputs"] = _read_structured_outputs(fields)
    return _the_one(found)


def _the_one(found: dict[str, Grammar | None]) -> Grammar | None:
    given = [name for name, grammar in found.items() if grammar is not None]
    if len(given) > 1:
        raise bad_request(
            f"{' and '.join(given)} together: an answer can be held to one form only", given[-1]
        )
    return found[given[0]] if given else None


def _read_response_format(fields: Fields) -> Grammar | None:
    given = fields.mapping("response_format")
    if given is None:
        return None
    inner = Fields(given, inside="response_format")
    kind, schema = inner.take("type"), inner.mapping("json_schema")
    inner.finish()
    match kind:
        case "text" if schema is None:
            return None
        case "json_object" if schema is None:
            return Grammar("json_object")
        case "json_schema" if schema is not None:
            return _read_json_schema(schema)
        case "json_schema":
            raise bad_request("response_format.json_schema is missing", "response_format.json_schema")
        case "text" | "json_object":
            raise bad_request(
                f"response_format.json_schema does not go with type {kind}", "response_format.json_schema"
            )
    raise inner.wrong("type", kind, "text, json_object or json_schema")


def _read_json_schema(given: dict[str, Any]) -> Grammar:
    """The schema in OpenAI's envelope; it always holds, whether `strict` asks for that or not."""
    inside = "response_format.json_schema"
    inner = Fields(given, inside=inside)
    inner.text("name")
    inner.text("description")
    inner.flag("strict")
    grammar = _read_source(inner, "schema", "json_schema", inside)
    inner.finish()
    if grammar is None:
        raise bad_request(f"{inside}.schema is missing", f"{inside}.schema")
    return grammar


def _read_structured_outputs(fields: Fields) -> Grammar | None:
    given = fields.mapping("structured_outputs")
    if given is None:
        return None
    inside = "structured_outputs"
    inner = Fields(given, inside=inside)
    found = {
        f"{inside}.{name}": _read_source(inner, name, kind, inside) for name, kind in _STRUCTURED.items()
    }
    found[f"{inside}.json_object"] = Grammar("json_object") if inner.flag("json_object") else None
    inner.finish(_STRUCTURED_NEUTRAL)
    return _the_one(found)


def _read_source(fields: Fields, name: str, kind: Any, inside: str = "") -> Grammar | None:
    """A grammar out of one parameter, of a kind that has a text."""
    match kind:
        case "json_schema":
            text = _read_schema_text(fields, name)
        case "choice":
            text = _read_choices(fields, name)
        case _:
            text = fields.text(name)
    if text == "":
        where = f"{inside}.{name}" if inside else name
        raise bad_request(f"{where} is empty", where)
    return None if text is None else Grammar(kind, text)


def _read_schema_text(fields: Fields, name: str) -> str | None:
    value = fields.take(name)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise fields.wrong(name, value, "a JSON schema") from None
    if not isinstance(value, dict):
        raise fields.wrong(name, value, "a JSON schema, an object")
    return json.dumps(value, ensure_ascii=False)


def _read_choices(fields: Fields, name: str) -> str | None:
    value = fields.take(name)
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise fields.wrong(name, value, "a list of strings that are not empty")
    return json.dumps(value, ensure_ascii=False)
