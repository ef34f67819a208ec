"""What is known of a batch's lines: which are answered, and whose names are taken.

Kept in a private database that spills to a temporary file, so that memory does not grow with the batch.
"""

from __future__ import annotations

import sqlite3
from types import TracebackType

from server.batch.records import RecordHead

_SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE answered (number INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE names (custom_id TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""


class Ledger:
    """Use it on one thread; closing it forgets everything."""

    def __init__(self) -> None:
        # The empty name is a temporary file of SQLite's own, of which two megabytes are in memory.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(_SCHEMA)
        self._database.execute("BEGIN")
        self.num_answered = 0
        self.num_failed = 0
        """Of the answered ones."""

    def add(self, head: RecordHead) -> bool:
        """Note a record; False, and nothing noted, if its line has one already."""
        added = self._database.execute(
            "INSERT OR IGNORE INTO answered VALUES (?, ?)", (head.number, head.digest)
        )
        if not added.rowcount:
            return False
        self.num_answered += 1
        self.num_failed += head.failed
        return True

    def digest(self, number: int) -> str | None:
        """What a line said when it was answered; None if it was not."""
        row = self._database.execute("SELECT digest FROM answered WHERE number = ?", (number,)).fetchone()
        return None if row is None else row[0]

    def claim(self, custom_id: str, number: int) -> int:
        """Give a name to a line, unless another has it; return the number of the line that has it."""
        self._database.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", (custom_id, number))
        row = self._database.execute("SELECT number FROM names WHERE custom_id = ?", (custom_id,)).fetchone()
        return row[0]

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
