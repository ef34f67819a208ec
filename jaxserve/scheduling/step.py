"""A step in the making, and the step as the host remembers it until its result arrives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.plan import EngineLimits, IntArray, SlotLoad, StepPlan
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.slots import BoolArray, Cohort, SlotTable


class ScoredRows(NamedTuple):
    """Log-probs of a prompt that a step brings."""

    request: Request
    start: int
    """Position of the first row."""
    num_rows: int
    first_row: int
    """Among the step's logit rows."""


class Round(NamedTuple):
    """Requests that take a token each of a collected step, before those of the next round do."""

    cohort: Cohort
    rows: IntArray
    """The row of each in the step's result."""
    foreseen: bool = True
    """Whether the tokens were counted when the step was planned: not those after accepted drafts."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """A planned step: what the device is told, and for whom. K sequences sample an unknown token."""

    plan: StepPlan
    loads: tuple[SlotLoad, ...]
    """Slots to fill before the step."""
    admitted: tuple[Request, ...]
    """The requests that fill the slots, in the order of `loads`."""
    cohort: Cohort
    """The K requests."""
    rows: IntArray
    """[K] the logit row of each; after it those of its drafts."""
    scored: tuple[ScoredRows, ...]
    num_drafts: IntArray | None = None
    """[K]; None in a step without any."""
    waited: bool = False
    """Whether it was planned only when the step before it had been collected, so that it could have some."""
    parts: Mapping[int, ScheduledStep] | None = None
    """Where there are several replicas, the parts of those that have any."""

    @property
    def most_rows(self) -> int:
        """Rows of the replica that has most."""
        if self.parts is None:
            return self.plan.num_rows
        return max(part.plan.num_rows for part in self.parts.values())

    @property
    def most_sampling(self) -> int:
        """Of the K sequences those of the replica that has most."""
        return max(len(part.rows) for part in self.parts.values()) if self.parts else len(self.rows)

    @property
    def decodes_only(self) -> bool:
        """Whether each sequence has a single row, which follows one that was there before."""
        return not self.loads and self.plan.num_rows == len(self.rows)

    def rounds(self, tokens: IntArray) -> Iterator[Round]:
        """What the step brought, in the order in which it is to be taken: each round may end requests of
        the next. `tokens` are those of its result."""
        num_iterations = self.plan.num_iterations
        num_rows = len(tokens) // num_iterations
        for iteration in range(num_iterations):
            yield Round(self.cohort, self.rows + iteration * num_rows if iteration else self.rows)
        if self.num_drafts is None:
            return
        for number in range(1, int(self.num_drafts.max()) + 1):
            drafted = (self.num_drafts >= number).nonzero()[0]
            accepted = drafted[tokens[self.rows[drafted] + number] >= 0]
            if not len(accepted):
                return
            yield Round(self.cohort.select(accepted), self.rows[accepted] + number, foreseen=False)


class Chunk(NamedTuple):
    """The next rows of a request: how many, and how many of them do what."""

    num_tokens: int
    num_logit_rows: int
    num_scored: int


class Drafts(NamedTuple):
    """What sequences verify beside computing a row."""

    counts: IntArray
    """[S] for each sequence; 0 for some."""
    tokens: IntArray
    """[sum of counts] one sequence's after the other's."""
    unread: IntArray | None = None
    """[S] as in `StepPlan.unread`."""


class StepBuilder:
    """Collects the parts of one step and keeps it within a shape that is compiled.

    First come the sequences that only decode, a row each, then the others, for each of which a row and a
    logit row stay reserved until its turn (`num_reserved`).
    """

    def __init__(
        self,
        limits: EngineLimits,
        table: SlotTable,
        max_chunk: int,
        decoding: IntArray,
        *,
        paced: bool = False,
    ) -> None:
        """`max_chunk`: the most tokens for the others together; `decoding`: slots; `paced`: whether a target
        of these makes those fewer."""
        largest = limits.chunk_shapes[-1]
        self._limits = limits
        self._table = table
        self.decoding = decoding
        """The slots that only decode."""
        self.narrowed = False
        """Whether others that only decode wait for their turn."""
        self._rows_left = largest.rows - len(decoding)
        self._logit_rows_left = largest.logit_rows - len(decoding)
        self._sequences_left = largest.sequences - len(decoding)
        self._chunk_left = max_chunk
        self.paced = paced
        self.num_reserved = 0
        self.num_iterations = 1
        """Tokens that each sequence computes one after another, if all only decode."""
        self.drafts: Drafts | None = None
        """What those that only decode verify."""
        self.reads: IntArray | None = None
        """As in `StepPlan`."""
        self.waited = False
        """As in `ScheduledStep`."""
        self._chunks: list[tuple[int, Chunk, int]] = []
        self._loads: list[SlotLoad] = []
        self._admitted: list[Request] = []

    @property
    def full(self) -> bool:
        """Whether no request can be admitted to this step."""
        return not (self._rows_left and self._logit_rows_left and self._sequences_left and self._chunk_left)

    @property
    def decodes_only(self) -> bool:
        """Whether every sequence of the step has a single row."""
        return not self._chunks and self.drafts is None

    @property
    def empty(self) -> bool:
        return not (len(self.decoding) or self._chunks)

    @property
    def num_spare(self) -> int:
        """Rows for drafts that leave one for each of the others, and one for another request."""
        return min(self._rows_left, self._logit_rows_left) - self.num_reserved - 1

    def narrow(self, decoding: IntArray) -> None:
        """Let only some of the slots decode, in a step that does nothing else."""
        self.narrowed = len(decoding) < len(self.decoding)
        if self.narrowed:
            self.decoding = decoding

    def verify(self, drafts: Drafts) -> None:
        """Let the sequences that decode verify drafts, `num_spare` at most."""
        self.drafts = drafts
        self._rows_left -= len(drafts.tokens)
        self._logit_rows_left -= len(drafts.tokens)

    def next_chunk(self, request: Request, start: int, todo: int, num_available: int) -> Chunk:
        """The most that the request can compute in this step, of `todo` tokens, with pages for so many."""
        rows = min(todo, num_available, self._rows_left - self.num_reserved)
        if todo > 1:
            rows = min(rows, self._chunk_left)
        if request.scores_prompt:
            submission = request.submission
            if start >= submission.num_scored:
                rows = min(rows, self._logit_rows_left - self.num_reserved)
                return Chunk(rows, rows, min(rows, submission.num_to_score - start))
            # Recomputing after a preemption: what has been scored stays apart from what has not.
            rows = min(rows, submission.num_scored - start)
        return Chunk(rows, 1, 0)

    def add(self, request: Request, chunk: Chunk, todo: int) -> None:
        """Put the request's next rows into the step."""
        self._rows_left -= chunk.num_tokens
        self._logit_rows_left -= chunk.num_logit_rows
        self._sequences_left -= 1
        if todo > 1:
            self._chunk_left -= chunk.num_tokens
        self._chunks.append((request.slot, chunk, todo))

    def load(self, request: Request, num_computed: int, copies: list[tuple[int, int, int]]) -> None:
        """Fill the request's slot before the step; `copies` are of the begun pages that it starts on."""
        submission = request.submission
        self._admitted.append(request)
        self._loads.append(
            SlotLoad(
                slot=request.slot,
                tokens=submission.prompt + request.output,
                num_prompt_tokens=len(submission.prompt),
                num_computed=num_computed,
                pages=tuple(tuple(pages) for pages in request.table.pages),
                params=submission.params,
                seed=submission.seed,
                sample_index=request.sample_index,
                eos_token_ids=self._limits.eos_token_ids,
                copies=tuple(copies),
                max_known=len(submission.prompt) + submission.max_tokens,
            )
        )

    def build(self, grants: list[tuple[int, int, int, int]]) -> ScheduledStep | None:
        """The step in the smallest shape that holds it, its rows counted as computed; None without rows."""
        if self.empty:
            return None
        granted = np.array(grants, np.int32).reshape(-1, 4)
        if self.decodes_only:
            return self._build_decode(granted)
        slots, num_tokens, num_logit_rows, samples = self._columns()
        row_ends = np.cumsum(num_logit_rows, dtype=np.int32)
        scored = self._score(row_ends)
        sampling = slots[samples]
        num_drafts = self._drafts_of(slots)
        self._count(slots, num_tokens - num_drafts, sampling)
        num_rows = int(num_tokens.sum())
        # Where a decode step is a tick, whoever is under way could have no row in one.
        decode = num_rows == len(slots) and self._limits.decode_groups == 1
        shape = self._limits.fit(num_rows, len(slots), int(row_ends[-1]), decode)
        return ScheduledStep(
            StepPlan(
                slots,
                num_tokens,
                num_logit_rows,
                granted,
                shape,
                drafts=self._draft_rows(row_ends),
                unread=self._unread(len(slots)),
                reads=self.reads,
            ),
            tuple(self._loads),
            tuple(self._admitted),
            self._table.cohort(sampling),
            (row_ends - num_drafts)[samples] - 1,
            scored,
            None if self.drafts is None else num_drafts[samples],
            self.waited,
        )

    def _build_decode(self, granted: IntArray) -> ScheduledStep:
        """The step where every sequence computes one row and samples after it."""
        slots = self.decoding
        size = len(slots)
        ones, rows = np.ones(size, np.int32), np.arange(size, dtype=np.int32)
        self._count(slots, 1, slots)
        shape = self._limits.fit(size, size, size, True)
        plan = StepPlan(slots, ones, ones, granted, shape, self.num_iterations, reads=self.reads)
        return ScheduledStep(plan, (), (), self._table.cohort(slots), rows, (), waited=self.waited)

    def _count(self, slots: IntArray, num_tokens: IntArray | int, sampling: IntArray) -> None:
        """Let the table know what the slots will have done after the step."""
        table = self._table
        if self.num_iterations > 1:
            num_ahead = table.num_ahead(slots, self.num_iterations)
            table.computed[slots] += num_ahead
            table.known[slots] += num_ahead
            table.pending[slots] += num_ahead
        else:
            table.computed[table.index(slots)] += num_tokens
            index = table.index(sampling)
            table.known[index] += 1
            table.pending[index] += 1
        index = table.index(sampling)
        table.held[index] = table.gated[index]

    def _columns(self) -> tuple[IntArray, IntArray, IntArray, BoolArray]:
        """Slot, rows, logit rows of each sequence, and whether its last row samples an unknown token."""
        ones = np.ones(len(self.decoding), np.int32)
        each = ones if self.drafts is None else ones + self.drafts.counts
        rows = [(slot, *chunk[:2], chunk.num_tokens == todo) for slot, chunk, todo in self._chunks]
        slots, num_tokens, num_logit_rows, samples = np.array(rows, np.int32).reshape(-1, 4).T
        return (
            np.concatenate([self.decoding, slots]),
            np.concatenate([each, num_tokens]),
            np.concatenate([each, num_logit_rows]),
            np.concatenate([ones, samples]).astype(np.bool_),
        )

    def _drafts_of(self, slots: IntArray) -> IntArray:
        """[S] of the step's sequences, the first of which decode."""
        num_drafts = np.zeros(len(slots), np.int32)
        if self.drafts is not None:
            num_drafts[: len(self.decoding)] = self.drafts.counts
        return num_drafts

    def _draft_rows(self, row_ends: IntArray) -> IntArray | None:
        """The drafts as in `StepPlan.drafts`."""
        if self.drafts is None:
            return None
        rows = np.full(row_ends[-1], -1, np.int32)
        ends = row_ends[: len(self.decoding)]
        is_draft = np.ones(ends[-1], np.bool_)
        is_draft[ends - self.drafts.counts - 1] = False
        rows[: ends[-1]][is_draft] = self.drafts.tokens
        return rows

    def _unread(self, num_sequences: int) -> IntArray | None:
        """As in `StepPlan`: whoever computes a prompt is left out."""
        if self.drafts is None or self.drafts.unread is None:
            return None
        unread = np.full(num_sequences, -1, np.int32)
        unread[: len(self.decoding)] = self.drafts.unread
        return unread

    def _score(self, row_ends: IntArray) -> tuple[ScoredRows, ...]:
        """The prompt log-probs that the step will bring, counted as asked for."""
        scored: list[ScoredRows] = []
        ends = row_ends[len(self.decoding) :].tolist()
        for (slot, chunk, _), end in zip(self._chunks, ends, strict=True):
            if chunk.num_scored:
                request = self._table.at(slot)
                request.submission.num_scored += chunk.num_scored
                start, first_row = int(self._table.computed[slot]), end - chunk.num_logit_rows
                scored.append(ScoredRows(request, start, chunk.num_scored, first_row))
        return tuple(scored)
