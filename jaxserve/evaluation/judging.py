"""What an answer is worth: matching what was expected, meeting a schema, refusing, agreeing with another."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.evaluation.instructions import parse_json
from jaxserve.evaluation.prompt_sets import JsonSchema

REFUSAL_OPENINGS = (
    "i cannot",
    "i can't",
    "i can not",
    "i am unable to",
    "i'm unable to",
    "i am not able to",
    "i'm not able to",
    "i won't",
    "i will not",
    "i must decline",
    "i'm sorry, but",
    "i am sorry, but",
    "sorry, but i",
    "i apologize, but",
    "as an ai",
    "as a language model",
)
"""An answer that begins with one of these refuses."""

_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def is_exact(answer: str, expected: str) -> bool:
    """Whether an answer gives what was expected.

    Of an expected text with `####` only what follows counts, as in GSM8K. A number is given if it is the
    answer's last number, its thousands separators aside. A text is given if it is the whole answer, once
    case, space, surrounding quotes and a final full stop are taken away.
    """
    expected = expected.rsplit("####", 1)[-1].strip()
    if _NUMBER.fullmatch(expected.lstrip("$")):
        numbers = _NUMBER.findall(answer)
        return bool(numbers) and _value(numbers[-1]) == _value(expected.lstrip("$"))
    return normalise(answer) == normalise(expected)


def normalise(text: str) -> str:
    """A text as it is compared."""
    return " ".join(text.casefold().split()).strip("\"'").removesuffix(".").strip("\"'")


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def refuses(answer: str) -> bool:
    """Whether an answer begins as a refusal does."""
    return answer.strip().lower().replace("\u2019", "'").startswith(REFUSAL_OPENINGS)


def require_schema_checker() -> None:
    """Raise ValueError, naming what to install, unless JSON schemas can be checked."""
    if importlib.util.find_spec("jsonschema") is None:
        raise ValueError("a schema needs the package jsonschema: pip install 'jaxserve[evaluate]'")


def check_schema(schema: JsonSchema) -> None:
    """Raise ValueError, saying why, for what is no JSON schema."""
    from jsonschema import SchemaError  # pyright: ignore[reportMissingModuleSource]

    try:
        _validator(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"no JSON schema: {error.message}") from error


def meets_schema(answer: str, schema: JsonSchema) -> bool:
    """Whether an answer is JSON, a Markdown fence around it aside, and valid."""
    try:
        value = parse_json(answer)
    except ValueError:
        return False
    return _validator(schema)(schema).is_valid(value)


def _validator(schema: JsonSchema) -> Any:
    """The class for the draft that the schema names."""
    from jsonschema import validators  # pyright: ignore[reportMissingModuleSource]

    return validators.validator_for(schema)


def common_share(first: Sequence[int], second: Sequence[int]) -> float:
    """Equal tokens before the first difference, as a share of the longer answer."""
    equal = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        equal += 1
    longest = max(len(first), len(second))
    return equal / longest if longest else 1.0
