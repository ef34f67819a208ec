"""The two files of a batch: do they belong together, and how far has the answering come?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from server.batch.journal import Journal
from server.batch.ledger import Ledger
from server.batch.records import as_line
from server.batch.sources import InputLine, open_source

_PARQUET = ".parquet"


class BatchFiles:
    """A batch and the answers to it so far. Its answers cannot be written by anybody else meanwhile.

    Parquet cannot be appended to: answers that are to become such a file are kept as JSON lines beside it,
    `NAME.parquet.partial.jsonl`, until there is one for every line.
    """

    def __init__(self, batch: Path, answers: Path) -> None:
        """Read both as far as they are there.

        Raises ValueError, naming the file and the line, for answers to another batch, for a file that holds
        something else, and where both are the same file; OSError for what cannot be read or written.
        """
        if answers.exists() and answers.samefile(batch):
            raise ValueError(f"{answers} is the batch itself: the answers need a file of their own")
        self._answers = answers
        self.lines: Iterable[InputLine] = open_source(batch)
        with ExitStack() as stack:
            self.ledger = stack.enter_context(Ledger())
            self.journal = stack.enter_context(Journal(_journal_path(answers), self.ledger))
            if self.journal.path != answers and self.journal.is_new and answers.exists():
                raise ValueError(f"{answers} has just been written by another process; try again")
            self.num_lines = _check_belongs(batch, self.lines, answers, self.ledger)
            self._closing = stack.pop_all()

    @property
    def num_left(self) -> int:
        """Lines without an answer."""
        return self.num_lines - self.ledger.num_answered

    def finish(self) -> None:
        """Every line has its answer: put the file in its final form."""
        if self.journal.path == self._answers:
            return
        from server.batch.parquet import write_answers

        with self.journal.path.open("rb") as file:
            write_answers(map(json.loads, file), self._answers)
        self.journal.path.unlink()

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _journal_path(answers: Path) -> Path:
    """Where answers are written as they come. Those of a Parquet file that is there already are put there."""
    if answers.suffix != _PARQUET:
        return answers
    from server.batch.parquet import read_answers

    journal = answers.with_name(f"{answers.name}.partial.jsonl")
    if answers.exists() and not journal.exists():
        with TemporaryDirectory(dir=answers.parent, prefix=f"{answers.name}.") as folder:
            copy = Path(folder) / journal.name
            with copy.open("wb") as file:
                file.writelines(map(as_line, read_answers(answers)))
            # Unlike a rename, this leaves alone what another process has put there meanwhile.
            with suppress(FileExistsError):
                os.link(copy, journal)
    return journal


def _check_belongs(batch: Path, lines: Iterable[InputLine], answers: Path, ledger: Ledger) -> int:
    """Count the lines of a batch. Raises ValueError if an answer is to none of them."""
    num_lines = num_found = 0
    for line in lines:
        num_lines += 1
        if num_found == ledger.num_answered:
            continue
        digest = ledger.digest(line.number)
        if digest is None:
            continue
        if digest != line.digest:
            raise ValueError(
                f"{answers} does not belong to {batch}: line {line.number} said something else when it was "
                "answered"
            )
        num_found += 1
    if num_found < ledger.num_answered:
        raise ValueError(
            f"{answers} does not belong to {batch}: it has {ledger.num_answered} answers, and {num_found} of "
            f"them are to its {num_lines} lines"
        )
    return num_lines
