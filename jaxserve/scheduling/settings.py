"""Frozen records of numbers that know their ranges, and that can be read from plain mappings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, TypeVar, cast

_BOUNDS = "bounds"
_Record = TypeVar("_Record")


def number(default: float | None, low: float, high: float) -> Any:
    """A field that holds any number from `low` to `high`, the ends included; a default of None lets None
    mean that the record chooses."""
    return dataclasses.field(default=default, metadata={_BOUNDS: (float(low), float(high), default is None)})


def whole(default: int | None, low: int, high: int = 2**62) -> Any:
    """A field that holds a whole number from `low` to `high`; a default of None lets None mean no limit."""
    return dataclasses.field(default=default, metadata={_BOUNDS: (low, high, default is None)})


def check_ranges(record: Any) -> None:
    """Raise ValueError, naming field, value and range, unless every field made above is within its own."""
    for field in dataclasses.fields(record):
        if _BOUNDS not in field.metadata:
            continue
        low, high, optional = field.metadata[_BOUNDS]
        value = getattr(record, field.name)
        if value is None and optional:
            continue
        kind, word = (Integral, "a whole number") if isinstance(low, int) else (Real, "a number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{field.name} {value!r} is not {word}")
        comparable: Any = value
        if not low <= comparable <= high:  # which NaN is not either
            raise ValueError(f"{field.name} {value} is out of range: it must be from {low} to {high}")


def read_record(base: _Record, mapping: Any, where: str) -> _Record:
    """`base`, a frozen record, with the fields that `mapping` names.

    Raises ValueError that begins with the path of the key, `where` in front, for an unknown key or a value
    that the record refuses.
    """
    values = read_table(mapping, where)
    names = {field.name for field in dataclasses.fields(base) if _BOUNDS in field.metadata}  # type: ignore[arg-type]
    check_keys(values, names, where)
    try:
        return dataclasses.replace(base, **values)  # type: ignore[type-var]
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error


def read_table(value: Any, where: str) -> Mapping[str, Any]:
    """`value` as a mapping from names. Raises ValueError if it is anything else."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} {value!r} is not a table of settings")
    table = cast("Mapping[Any, Any]", value)
    for key in table:
        if not isinstance(key, str):
            raise ValueError(f"{where} has the key {key!r}; every key is a name")
    return table


def check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raise ValueError for a key that is not `known`."""
    for key in table:
        if key not in known:
            path = f"{where}.{key}" if where else key
            raise ValueError(f"{path} is not a setting; there are {', '.join(sorted(known))}")
