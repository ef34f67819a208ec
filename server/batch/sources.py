"""The lines of a batch, one after the other: of a file of JSON lines, or the rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from server.batch.lines import MAX_LINE_BYTES, InputLine, digest_of

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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
                    yield InputLine(number, None, digest_of(_whole_line(data, file.readline)))
                    continue
                if number == 1:
                    data = data.removeprefix(_BYTE_ORDER_MARK)
                if data := data.strip():
                    yield InputLine(number, data, digest_of([data]))


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


def _whole_line(begun: bytes, readline: Callable[[int], bytes]) -> Iterator[bytes]:
    while begun:
        yield begun
        begun = b"" if begun.endswith(b"\n") else readline(MAX_LINE_BYTES)
