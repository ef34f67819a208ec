"""Traces on disk: Azure's 2023 CSV, Mooncake's JSON lines, and JSON lines of our own.

Ours has one object a line: `arrival` (seconds), `prompt_tokens`, `output_tokens`, and, if wanted,
`prefix_hashes` (one whole number for each block of 512 prompt tokens), `tenant` and `priority`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxserve.planning.traces import Trace, TraceRequest

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_OWN_KEYS = tuple(field.name for field in fields(TraceRequest))
_DEFAULTS = {field.name: field.default for field in fields(TraceRequest)}


@dataclass(frozen=True)
class _Line:
    """Where a record stands, for the messages about it."""

    path: Path
    number: int
    """From 1 on."""
    values: Mapping[str, Any]

    def error(self, complaint: str) -> ValueError:
        return ValueError(f"{self.path}, line {self.number}: {complaint}")

    def get(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise self.error(f"{name} is missing")
        return self.values[name]

    def integer(self, name: str) -> int:
        value = self.get(name)
        if isinstance(value, str):  # as in CSV
            try:
                return int(value)
            except ValueError:
                raise self.error(f"{name} {value!r} is not a whole number") from None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{name} {value!r} is not a whole number")
        return value

    def seconds(self, name: str, unit: float = 1.0) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name} {value!r} is not a number")
        return value * unit

    def hashes(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.error(f"{name} is not a list of whole numbers")
        return tuple(value)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.error(f"{name} {value!r} is not a text")
        return value


def read_trace(path: str | Path) -> Trace:
    """Read a trace, in whichever of the three formats it is; the content tells, not the name.

    Requests are put in the order of their arrival, the first at its own time (ours, Mooncake) or at 0
    (Azure). Raises ValueError, naming file, line and field, for what cannot be read; OSError for a file
    that cannot be opened.
    """
    path = Path(path)
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            read, lines = _detect(path, file)
            for line in lines:
                try:
                    requests.append(read(line))
                except ValueError as error:
                    raise error if str(error).startswith(str(path)) else line.error(str(error)) from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text in UTF-8: {error}") from None
    if not requests:
        raise ValueError(f"{path} holds no request")
    requests.sort(key=lambda request: request.arrival)
    return Trace(path.stem, tuple(requests))


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace in our own format, which `read_trace` reads back as it was."""
    with Path(path).open("w", encoding="utf-8") as file:
        for request in trace.requests:
            entry = {k: v for k, v in asdict(request).items() if v != _DEFAULTS[k]}
            file.write(json.dumps(entry) + "\n")


_Reader = Callable[[_Line], TraceRequest]


def _detect(path: Path, file: Iterator[str]) -> tuple[_Reader, Iterator[_Line]]:
    """What reads one record, and the records."""
    first = next(file, "")
    header = next(csv.reader([first]), [])
    if set(_AZURE_COLUMNS) <= set(header):
        return _AzureReader(), _csv_lines(path, header, file)
    lines = _json_lines(path, first, file)
    keys = _json_object(path, 1, first).keys() if first.lstrip().startswith("{") else ()
    if set(_MOONCAKE_KEYS) <= set(keys):
        return _read_mooncake, lines
    if "arrival" in keys:
        return _read_own, lines
    raise ValueError(
        f"{path}, line 1: not a trace that is known: expected a CSV header with {', '.join(_AZURE_COLUMNS)}, "
        f"or JSON objects with {', '.join(_MOONCAKE_KEYS)}, or with {', '.join(_OWN_KEYS)}"
    )


def _csv_lines(path: Path, header: list[str], file: Iterator[str]) -> Iterator[_Line]:
    for number, row in enumerate(csv.reader(file), start=2):
        if row:
            yield _Line(path, number, dict(zip(header, row, strict=False)))


def _json_lines(path: Path, first: str, file: Iterator[str]) -> Iterator[_Line]:
    yield _Line(path, 1, _json_object(path, 1, first))
    for number, text in enumerate(file, start=2):
        if text.strip():
            yield _Line(path, number, _json_object(path, number, text))


def _json_object(path: Path, number: int, text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}, line {number}: {type(value).__name__} instead of a JSON object")
    return value


class _AzureReader:
    """Times are of a calendar; the first record's is the start."""

    def __init__(self) -> None:
        self._start: datetime | None = None

    def __call__(self, line: _Line) -> TraceRequest:
        stamp = line.text("TIMESTAMP")
        try:
            time = datetime.fromisoformat(stamp).replace(tzinfo=None)
        except ValueError:
            raise line.error(f"TIMESTAMP {stamp!r} is not a date and a time") from None
        if self._start is None:
            self._start = time
        return TraceRequest(
            arrival=(time - self._start).total_seconds(),
            prompt_tokens=line.integer("ContextTokens"),
            output_tokens=line.integer("GeneratedTokens"),
        )


def _read_mooncake(line: _Line) -> TraceRequest:
    return TraceRequest(
        arrival=line.seconds("timestamp", 1e-3),
        prompt_tokens=line.integer("input_length"),
        output_tokens=line.integer("output_length"),
        prefix_hashes=line.hashes("hash_ids"),
    )


def _read_own(line: _Line) -> TraceRequest:
    for name in line.values:
        if name not in _OWN_KEYS:
            raise line.error(f"unknown field {name!r}; the fields are {', '.join(_OWN_KEYS)}")
    given = line.values
    return TraceRequest(
        arrival=line.seconds("arrival"),
        prompt_tokens=line.integer("prompt_tokens"),
        output_tokens=line.integer("output_tokens"),
        prefix_hashes=line.hashes("prefix_hashes") if "prefix_hashes" in given else (),
        tenant=line.text("tenant") if "tenant" in given else "",
        priority=line.text("priority") if "priority" in given else "default",
    )
