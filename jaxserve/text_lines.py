"""The lines of a text file, compressed or not."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path


def text_lines(path: Path) -> Iterator[str]:
    """Each line of a UTF-8 file with its end; of one named `.gz`, decompressed.

    Raises ValueError, naming the file, for what is no UTF-8 or breaks off; OSError where it cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                yield line.decode("utf-8")
    except (UnicodeDecodeError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from error
