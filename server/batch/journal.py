"""The file that answers are written to as they come, each a whole line; a killed run's is taken up."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from jaxserve.interrupts import interrupts_deferred
from server.batch.ledger import Ledger
from server.batch.records import Json, as_line, head_of

_FIRST_BYTES = b'{"id": "batch_req_'
"""Of every record."""
_HINT = "name a file that does not exist, or that an earlier run wrote"


class Journal:
    """An open answer file, whose records are in a ledger.

    Nothing is written, nor a torn record cut off, before the first `append`. Another process cannot open it
    meanwhile.
    """

    def __init__(self, path: Path, ledger: Ledger) -> None:
        """Open or create the file, and read what is in it.

        Raises ValueError, naming the line, for a file that was not written here, or for one that another
        process has open; OSError for one that cannot be opened.
        """
        self.path = path
        self._ledger = ledger
        self._file, self.is_new = _open_locked(path)
        """And whether it was made here."""
        try:
            self._end = self._read()
        except BaseException:
            self.close()
            raise
        self._untouched = True
        """Whether there may be something behind `_end`."""

    def append(self, record: Json) -> None:
        """Write a record; it is out of this process's hands when this returns. Ctrl-C waits for it."""
        with interrupts_deferred():
            if self._untouched:
                self._file.truncate(self._end)
                self._untouched = False
            self._ledger.add(head_of(record))
            self._file.write(as_line(record))
            self._file.flush()

    def close(self) -> None:
        """Let go of the file; one that was made here and got no record is gone."""
        with self._file:  # Whoever opens it before it is gone cannot lock it.
            if self.is_new and not os.fstat(self._file.fileno()).st_size and _has_name(self._file, self.path):
                self.path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> int:
        """Take the records into the ledger; return where the last whole one ends."""
        self._file.seek(0)
        end = 0
        for number, data in enumerate(self._file, start=1):
            if not data.endswith(b"\n"):
                _check_torn(self.path, number, data)
                break
            self._take(number, data)
            end += len(data)
        return end

    def _take(self, number: int, data: bytes) -> None:
        try:
            head = head_of(json.loads(data))
        except ValueError as error:
            raise ValueError(f"{self.path}:{number}: {error}; {_HINT}") from error
        if not self._ledger.add(head):
            raise ValueError(f"{self.path}:{number}: line {head.number} of the batch is answered twice")


def _open_locked(path: Path) -> tuple[BinaryIO, bool]:
    """The file of that name, for this process alone, and whether it is new.

    Raises ValueError for one that another process has open.
    """
    while True:
        is_new = not path.exists()
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"{path} is being written by another process") from None
        if _has_name(file, path):
            return file, is_new
        file.close()  # Who had it open has removed it before it could be locked here.


def _has_name(file: BinaryIO, path: Path) -> bool:
    """Whether this is still the file of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _check_torn(path: Path, number: int, data: bytes) -> None:
    """Raise ValueError unless this is how a record begins: somebody else's last line is not to be cut off."""
    if not (data.startswith(_FIRST_BYTES) or _FIRST_BYTES.startswith(data)):
        raise ValueError(f"{path}:{number}: it is no record of a batch; {_HINT}")
