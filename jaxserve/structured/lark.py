"""Every kind of grammar as one language: the dialect of Lark that `llguidance` reads."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.plan import Grammar

MAX_TEXT = 256 * 1024
"""Longest grammar in characters."""

_HEADER = '%llguidance {"no_forcing": true}\n'
"""Without it a mask holds only one way to spell what the grammar leaves no choice about; the exact set is
what "may be sampled" means, and needs no tokenizer."""

_WHITESPACE = r"[ \t\r\n]{1,64}"
"""Between JSON tokens: enough for any sane indentation, and no model can emit blanks for ever."""

_JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
"""They take the place of any that the schema itself brings: an unknown keyword is refused, never ignored."""

_EBNF_TOKEN = re.compile(
    r"""
    (?P<quoted> "(?:\\.|[^"\\\n])*" | \[(?:\\.|[^\]\\\n])*\] )
    | (?P<comment> \#[^\n]* )
    | (?P<continued> \n (?! \s* [\w-]+ \s* ::= ) )
    """,
    re.VERBOSE,
)
_EBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def to_lark(grammar: Grammar) -> str:
    """A grammar as Lark source.

    Takes time and stack in proportion to the text for json_object and choice; may take more for the others.
    Raises ValueError, naming what is wrong, for a text that is too long or malformed. What is well-formed
    but cannot be compiled is found only later.
    """
    if len(grammar.text) > MAX_TEXT:
        raise ValueError(f"{grammar.kind} of {len(grammar.text)} characters; the limit is {MAX_TEXT}")
    converters = {
        "json_object": lambda _: _json_schema({"type": "object"}),
        "json_schema": lambda text: _json_schema(_parse_json("json_schema", text)),
        "regex": _regex,
        "choice": _choice,
        "ebnf": _ebnf,
    }
    return _HEADER + converters[grammar.kind](grammar.text)


def _parse_json(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{kind} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{kind} is not JSON: {error}") from None


def _json_schema(schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema is a JSON {type(schema).__name__}; it must be an object or a boolean")
    return "start: %json " + json.dumps(schema | {"x-guidance": _JSON_OPTIONS})


def _regex(pattern: str) -> str:
    r"""The whole text matches. `\d` and `\w` are ASCII, as they are in a schema's patterns."""
    from llguidance import regex_to_lark

    # Lark reads two slashes as a comment.
    escaped = regex_to_lark(pattern, "dw")
    return f"start: /{escaped or '()'}/"


def _choice(text: str) -> str:
    choices = _parse_json("choice", text)
    if not isinstance(choices, list) or not choices:
        raise ValueError("choice must be a JSON list of one or more strings")
    for choice in choices:
        if not isinstance(choice, str) or _has_surrogate(choice):
            raise ValueError(f"choice {choice!r} is not a string of Unicode characters")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _ebnf(text: str) -> str:
    """GBNF, as llama.cpp and xgrammar write it, by llguidance's own converter; Lark as it is."""
    if not _EBNF_RULE.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_EBNF_TOKEN.sub(_plain_ebnf, text))
    except RecursionError:
        raise ValueError("ebnf is nested too deeply") from None
    except Exception as error:  # The converter raises bare Exception for a grammar's own faults.
        raise ValueError(f"ebnf: {error}") from None


def _plain_ebnf(token: re.Match[str]) -> str:
    """What the converter would misread: rules that go on over lines, and escapes by code point."""
    if token["quoted"]:
        return _EBNF_ESCAPE.sub(_plain_escape, token["quoted"])
    return "" if token["comment"] else " "


def _plain_escape(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    point = int(digits, 16)
    if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
        raise ValueError(f"{escape[0]} is no Unicode character")
    return f"\\x{point:02x}" if point < 0x80 else chr(point)
