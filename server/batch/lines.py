"""One line of a batch, and the name that its answer has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

MAX_LINE_BYTES = 8 * 2**20
"""As much as the HTTP door takes of one request."""


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


def line_of(number: int, data: bytes) -> InputLine:
    """A line that says this."""
    return InputLine(number, data if len(data) <= MAX_LINE_BYTES else None, digest_of([data]))


def digest_of(parts: Iterable[bytes]) -> str:
    """Of what a line says, in pieces."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
