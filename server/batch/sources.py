"""The lines of a batch, one after the other: of a file of JSON lines, or the rows of a Parquet file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_BYTES = 8 * 2**20
"""As much as the HTTP door takes of one request."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputLine:
    """One line as it was read."""

    number: int
    """In the file, from 1."""
    data: bytes | None
    """What it says, without the end of the line; None if that is longer than MAX_LINE_BYTES."""
    digest: str
    """Sixteen hexadecimal digits that change with what it says."""

    @property
    def record_id(self) -> str:
        """The `id` of its answer: which line of the file, and what it said."""
        return f"batch_req_{self.number}-{self.digest}"


class JsonLines:
    """A file of JSON objects, one a line; blank lines are none. Iterating over it reads it anew."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[InputLine]:
        with self._path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(data) > MAX_LINE_BYTES:
                    yield InputLine(number, None, _digest(_whole_line(data, file.readline)))
                    continue
                if number == 1:
                    data = data.removeprefix(_BYTE_ORDER_MARK)
                if data := data.strip():
                    yield InputLine(number, data, _digest([data]))


def open_source(path: Path) -> Iterable[InputLine]:
    """The lines of a `.parquet` file, or of a file of JSON lines.

    Raises OSError for a file that cannot be read, ValueError for one that is no Parquet file with the columns
    of a batch.
    """
    if path.suffix == ".parquet":
        from server.batch.parquet import ParquetRows

        return ParquetRows(path)
    with path.open("rb"):
        return JsonLines(path)


def line_of(number: int, data: bytes) -> InputLine:
    """A line that says this."""
    return InputLine(number, data if len(data) <= MAX_LINE_BYTES else None, _digest([data]))


def _whole_line(begun: bytes, readline: Callable[[int], bytes]) -> Iterator[bytes]:
    while begun:
        yield begun
        begun = b"" if begun.endswith(b"\n") else readline(MAX_LINE_BYTES)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
