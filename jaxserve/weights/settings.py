"""Reading typed values out of a model's settings: a wrong one is an error that names file, key and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.config import ModelConfig

_REQUIRED: Any = object()


class Settings:
    """A mapping of settings from one file, read by typed getters.

    A key whose value is null counts as absent. Every getter raises ValueError for a missing required key
    and for a value of the wrong type or below its minimum. `prefix` is put before every key that is asked
    for; messages name the full key.
    """

    def __init__(self, values: Mapping[str, Any], source: Path, prefix: str = "") -> None:
        self.source = source
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    @classmethod
    def from_json(cls, path: Path) -> Settings:
        """The settings in a JSON file that holds one object."""
        if not path.exists():
            raise ValueError(f"{path}: missing")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}: holds a JSON {type(values).__name__}, expected an object")
        return cls(values, path)

    def mentions(self, key: str) -> bool:
        """Whether the key is there at all, be it with the value null."""
        return self._prefix + key in self._values

    def get(self, key: str) -> Any:
        """The value as it is, None where absent."""
        self._read.add(self._prefix + key)
        return self._values.get(self._prefix + key)

    def integer(self, key: str, default: int = _REQUIRED, *, minimum: int = 1) -> int:
        value = self._lookup(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.refuse(key, f"an integer of at least {minimum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        return None if self.get(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A positive, finite number."""
        value = self._lookup(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            self.refuse(key, "a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        value = self._lookup(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str = _REQUIRED) -> str:
        value = self._lookup(key, default)
        if value not in choices:
            self.refuse(key, " or ".join(choices))
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of them, as a tuple; empty where absent."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            self.refuse(key, "a token id or a list of them")
        return tuple(ids)

    def section(self, key: str) -> Settings | None:
        """The settings nested under a key, None where absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "an object")
        return Settings(
            {f"{self._prefix}{key}.{k}": v for k, v in value.items()}, self.source, f"{self._prefix}{key}."
        )

    def insist(self, required: Mapping[str, Any]) -> None:
        """Each key must be absent or have exactly the given value: the only one that is supported."""
        for key, value in required.items():
            found = self.get(key)
            if found is not None and found != value:
                self.refuse(key, "absent" if value is None else f"{value!r}, or absent")

    def refuse_unread(self, supported: str) -> None:
        """Refuses the first key under the prefix, if there is one, that no getter has asked for."""
        for key in self._values:
            if key.startswith(self._prefix) and key not in self._read:
                self.refuse(key.removeprefix(self._prefix), supported)

    def refuse(self, key: str, supported: str) -> NoReturn:
        """Raises the ValueError that says what was found under a key and what is supported."""
        found = shorten(self._values.get(self._prefix + key))
        raise ValueError(f"{self.source}: {self._prefix}{key} is {found}; supported: {supported}")

    def _lookup(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.source}: {self._prefix}{key} is missing")
        return default


def build_config(source: Path, **fields: Any) -> ModelConfig:
    """A ModelConfig whose own refusals name the file that the values are from."""
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def shorten(value: object, limit: int = 200) -> str:
    """The repr of a value, cut to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
