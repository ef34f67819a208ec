"""Answers a batch: reads ahead, keeps the engine full, and writes each answer when it has come."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.interrupts import interrupts_deferred
from jaxserve.offline import OfflineLoop
from jaxserve.outputs import AnswerDelta, RequestOutput
from server.batch.errors import LineError
from server.batch.files import BatchFiles
from server.batch.lines import InputLine
from server.batch.records import Json, answered, refused, unusable
from server.batch.requests import LineRequest, PreparedRequest, Preparer, read_line
from server.batch.sweep import Sweep
from server.core import ServiceError, Status
from server.http.answers import new_name
from server.http.errors import ApiError, bad_request, from_service

READ_AHEAD = 1024
"""Lines that are read before their turn, and put in an order in which prompts that begin alike meet."""
READ_AHEAD_BYTES = 2**26
"""The most that these may have."""
_OPEN_SHARE = 2
"""Samples that the engine is given, for each that it can run: those that wait fill a slot at once."""
_LINES_A_STEP = 64
"""Read while requests are open: many lines that need no answer must not keep the engine waiting."""

Progress = Callable[[int, int], object]
"""Called with the lines that are done, earlier runs' included, and the tokens of this run so far."""


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """How a run went."""

    num_lines: int
    """Of the batch."""
    num_before: int
    """Of these, answered by earlier runs."""
    num_failed: int
    """Lines that got an error instead of an answer, in all runs."""
    num_prompt_tokens: int
    """Of this run, a prompt once for all of its samples."""
    num_cached_tokens: int
    """Of these, those whose keys and values were reused."""
    num_tokens: int
    """Sampled in this run."""
    seconds: float
    """From its first line to its last answer."""


@dataclass
class _OpenRequest:
    """A request that the engine has been given."""

    request: PreparedRequest
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """Those that have ended, by the number of the prompt."""

    @property
    def complete(self) -> bool:
        return len(self.outputs) == len(self.request.prompts)


class BatchRun:
    """One run over a batch, on the caller's thread. Ctrl-C ends it with every written answer whole."""

    def __init__(
        self,
        files: BatchFiles,
        preparer: Preparer,
        loop: OfflineLoop,
        *,
        num_slots: int,
        read_ahead: int = READ_AHEAD,
        fingerprint: str | None = None,
        on_progress: Progress = lambda done, tokens: None,
    ) -> None:
        """Prepare a run.

        Args:
            files: the batch, and where its answers go.
            preparer: for the same loop.
            loop: nobody else may use it.
            num_slots: sequences that it runs at once.
            read_ahead: lines that are read before their turn.
            fingerprint: of all that the answers depend on, which they bear as OpenAI's system_fingerprint.
            on_progress: see `Progress`.
        """
        self._files = files
        self._preparer = preparer
        self._loop = loop
        self._max_open = _OPEN_SHARE * num_slots
        self._marks = {} if fingerprint is None else {"system_fingerprint": fingerprint}
        self._on_progress = on_progress
        self._lines = iter(files.lines)
        self._sweep = Sweep(read_ahead, READ_AHEAD_BYTES)
        self._num_open = 0
        """Samples that the engine has been given."""
        self._exhausted = False
        self._num_before = files.ledger.num_answered
        self._num_prompt_tokens = self._num_cached_tokens = self._num_tokens = 0

    def run(self) -> BatchReport:
        """Answer every line that has no answer.

        Raises OSError where one cannot be written; ServiceError, UNAVAILABLE, or CheckLostError where it
        cannot be found out now what a line would get. What has been answered is kept.
        """
        started = time.monotonic()
        try:
            while self._advance():
                self._on_progress(self._files.ledger.num_answered, self._num_tokens)
        finally:
            self._loop.close()
        ledger = self._files.ledger
        return BatchReport(
            num_lines=self._files.num_lines,
            num_before=self._num_before,
            num_failed=ledger.num_failed,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_tokens=self._num_tokens,
            seconds=time.monotonic() - started,
        )

    def _advance(self) -> bool:
        """Read, start and step as far as there is something to; False once all is answered."""
        self._read_ahead()
        while len(self._sweep) and self._has_room(self._sweep.next()):
            with interrupts_deferred():  # A request is given to the engine whole, or not at all.
                self._start(self._sweep.take())
        if self._num_open:
            self._loop.step()
        return not self._exhausted or len(self._sweep) > 0 or self._num_open > 0

    def _has_room(self, request: PreparedRequest) -> bool:
        return not self._num_open or self._num_open + request.num_samples <= self._max_open

    def _read_ahead(self) -> None:
        num_read = 0
        while not (self._exhausted or self._sweep.full or (self._num_open and num_read == _LINES_A_STEP)):
            line = next(self._lines, None)
            if line is None:
                self._exhausted = True
            else:
                self._take(line)
            num_read += 1

    def _take(self, line: InputLine) -> None:
        """Prepare a line, or write why it gets no answer; one that has one only keeps its name."""
        has_answer = self._files.ledger.digest(line.number) is not None
        try:
            asked = self._named(line)
        except LineError as error:
            if not has_answer:
                self._files.journal.append(unusable(line, error))
            return
        if not has_answer:
            self._prepare(asked)

    def _named(self, line: InputLine) -> LineRequest:
        """What a line asks under a name of its own. Raises LineError."""
        try:
            asked = read_line(line)
        except LineError as error:
            if error.custom_id:
                self._claim(error.custom_id, line)
            raise
        self._claim(asked.custom_id, line)
        return asked

    def _claim(self, custom_id: str, line: InputLine) -> None:
        owner = self._files.ledger.claim(custom_id, line.number)
        if owner != line.number:
            # Without the name: whoever looks an answer up by it is to find the one that there is.
            raise LineError("duplicate_custom_id", f"custom_id {custom_id!r} is that of line {owner} already")

    def _prepare(self, asked: LineRequest) -> None:
        try:
            self._sweep.add(self._preparer.prepare(asked))
        except ApiError as error:
            self._refuse(asked.line, asked.custom_id, error)
        except ServiceError as error:
            if error.status is Status.UNAVAILABLE:  # An answer is for good, and this one is for now.
                raise
            self._refuse(asked.line, asked.custom_id, from_service(error))

    def _refuse(self, line: InputLine, custom_id: str, error: ApiError) -> None:
        self._files.journal.append(refused(line, custom_id, new_name("req"), error))

    def _start(self, request: PreparedRequest) -> None:
        opened = _OpenRequest(request)
        names: list[str] = []
        try:
            for index, prompt in enumerate(request.prompts):
                sink = functools.partial(self._on_delta, opened, index)
                names.append(self._loop.submit(prompt.encoded, prompt.params, sink, prompt.terms))
        except (
            ValueError
        ) as error:  # Its grammar was forgotten since the line was read, and now takes too long.
            self._loop.abort(names)
            self._refuse(request.line, request.custom_id, bad_request(str(error)))
        else:
            self._num_open += request.num_samples

    def _on_delta(self, opened: _OpenRequest, index: int, delta: AnswerDelta) -> None:
        self._num_tokens += len(delta.token_ids)
        if delta.output is None:
            return
        opened.outputs[index] = delta.output
        self._num_prompt_tokens += len(delta.output.prompt_token_ids)
        self._num_cached_tokens += delta.output.num_cached_tokens
        if opened.complete:
            self._num_open -= opened.request.num_samples
            self._files.journal.append(self._record(opened))

    def _record(self, opened: _OpenRequest) -> Json:
        request = opened.request
        body = request.answer.whole([output for _, output in sorted(opened.outputs.items())])
        return answered(request.line, request.custom_id, request.request_id, body | self._marks)
