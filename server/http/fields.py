"""Reading a JSON object field by field: each complaint names its field, and nothing is ignored silently."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from server.http.errors import ApiError, bad_request

_INT64 = 2**63
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 60
_BRIEF.maxlevel = 3

Neutral = Mapping[str, Callable[[Any], bool]]
"""Parameters without effect here, each with the test of a value that asks for none."""


def shown(value: object) -> str:
    """A value as a message shows it: cut short, however long or deep it is."""
    return _BRIEF.repr(value)


class Fields:
    """A JSON object being used up: every reader takes its field out, `finish` refuses what is left.

    null counts as absent everywhere. All readers raise ApiError (400) naming the field, the value and
    what was expected.
    """

    def __init__(self, body: Mapping[str, Any], *, inside: str = "") -> None:
        """inside: the name of the parameter that this object is the value of, for messages."""
        self._rest = {name: value for name, value in body.items() if value is not None}
        self._prefix = f"{inside}." if inside else ""

    def take(self, name: str, default: Any = None) -> Any:
        """The value as it is."""
        return self._rest.pop(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def integer(self, name: str, default: int | None = None) -> int | None:
        value = self.take(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, value, "a whole number")
        if not -_INT64 <= value < _INT64:
            raise bad_request(
                f"{self._prefix}{name} is out of range: it must fit 64 bits", self._prefix + name
            )
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        return None if value is None else self.as_number(name, value)

    def as_number(self, name: str, value: Any) -> float:
        """Check a value that was taken out, or lies inside one that was."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, value, "a number")
        try:
            return float(value)
        except OverflowError:
            raise bad_request(f"{self._prefix}{name} is out of range", self._prefix + name) from None

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A string, or a list of at most so many."""
        value = self.take(name, [])
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(name, value, "a string or a list of strings")
        if len(value) > most:
            raise bad_request(f"{name} has {len(value)} strings; the limit is {most}", self._prefix + name)
        return tuple(value)

    def token_ids(self, name: str) -> list[int] | None:
        value = self.take(name)
        if value is not None and not is_token_ids(value):
            raise self.wrong(name, value, "a list of token ids")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return value

    def finish(self, neutral: Neutral | None = None) -> None:
        """Refuse every field that was not taken, unless it is a known one whose value asks for nothing."""
        for name, value in self._rest.items():
            harmless = (neutral or {}).get(name)
            if harmless is None:
                raise bad_request(
                    f"unknown parameter {shown(self._prefix + name)}",
                    self._prefix + name,
                    "unknown_parameter",
                )
            if not harmless(value):
                raise bad_request(
                    f"{self._prefix}{name} {shown(value)} asks for something that this server cannot do",
                    self._prefix + name,
                    "unsupported_parameter",
                )

    def wrong(self, name: str, value: Any, expected: str) -> ApiError:
        return bad_request(
            f"{self._prefix}{name} is {shown(value)}; expected {expected}", self._prefix + name
        )


def is_token_ids(value: object) -> bool:
    """Whether this is a list of integers that could be token ids; an empty list is."""
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31 for one in value
    )


def is_one_of(*values: Any) -> Callable[[Any], bool]:
    """A test of equality in which true is not 1."""
    return lambda value: any(value == one and type(value) is type(one) for one in values)


def is_nothing(value: object) -> bool:
    """The test that no value passes: null alone, which counts as absent, asks for nothing."""
    return False
