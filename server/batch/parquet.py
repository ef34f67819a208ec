"""Batches and their answers as Parquet files, by pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from server.batch.lines import InputLine, line_of
from server.batch.records import Json

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ValueError(
        "Parquet files need the extra `parquet`: in the checkout, pip install -e '.[parquet]'"
    ) from error

_COLUMNS = ("custom_id", "method", "url", "body")
_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 2**24
"""Of answers in one row group."""
_ROW_BYTES = 200
"""Of a row beside the answer, roughly."""

_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("custom_id", pa.string()),
        (
            "response",
            pa.struct([("status_code", pa.int32()), ("request_id", pa.string()), ("body", pa.string())]),
        ),
        ("error", pa.struct([("code", pa.string()), ("message", pa.string())])),
    ]
)
"""As the records; a body is JSON, since its form differs from request to request."""


class ParquetRows:
    """The rows of a Parquet file as lines: the columns custom_id, method, url and body, which is a struct or
    JSON. Other columns are not looked at. In a struct, null is what was left out."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is not Parquet or lacks a column."""
        self._path = path
        with self._open() as file:
            missing = [name for name in _COLUMNS if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}")

    def __iter__(self) -> Iterator[InputLine]:
        number = 0
        with self._open() as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(_COLUMNS)):
                for row in batch.to_pylist():
                    number += 1
                    yield line_of(number, _line(row))

    def _open(self) -> pq.ParquetFile:
        return _open(self._path)


def write_answers(records: Iterable[Json], path: Path) -> None:
    """A Parquet file of records, which takes its place when it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    with pq.ParquetWriter(partial, _SCHEMA) as writer:
        rows: list[Json] = []
        num_bytes = 0
        for record in records:
            row = _row(record)
            rows.append(row)
            num_bytes += _ROW_BYTES + len(row["response"]["body"] if row["response"] else "")
            if num_bytes >= _BYTES_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(rows, _SCHEMA))
                rows, num_bytes = [], 0
        writer.write_table(pa.Table.from_pylist(rows, _SCHEMA))
    partial.replace(path)


def read_answers(path: Path) -> Iterator[Json]:
    """The records of a file that `write_answers` wrote. Raises ValueError, naming the file, for another."""
    with _open(path) as file:
        if not file.schema_arrow.equals(_SCHEMA):
            raise ValueError(f"{path} is no answer file of a batch: it has other columns")
        for batch in file.iter_batches(_ROWS_AT_ONCE):
            for row in batch.to_pylist():
                if row["response"] is not None:
                    row["response"]["body"] = json.loads(row["response"]["body"])
                yield row


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: {error}") from error


def _line(row: dict[str, Any]) -> bytes:
    body = row["body"]
    body = _parsed(body) if isinstance(body, str) else _without_nulls(body)
    text = json.dumps({**row, "body": body}, ensure_ascii=False, default=_named_type)
    # Half of a surrogate pair becomes JSON's escape of it, which is refused where the line is read.
    return text.encode(errors="backslashreplace")


def _parsed(body: str) -> Any:
    """The object that a text says, or the text itself, which is refused where the line is read."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body


def _named_type(value: object) -> Json:
    """Stands for a date, bytes and the like, which JSON does not have: whatever expects a text refuses it."""
    return {"type": type(value).__name__}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _row(record: Json) -> Json:
    response = record["response"]
    if response is not None:
        response = {**response, "body": json.dumps(response["body"], ensure_ascii=False)}
    return {**record, "response": response}
