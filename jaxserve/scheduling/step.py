"""A step in the making, and the step as the host remembers it until its result arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.plan import EngineLimits, PageGrant, SequencePlan, SlotLoad, StepPlan, StepShape
from jaxserve.scheduling.request import Request


class StepPart(NamedTuple):
    """What one request does in a step."""

    request: Request
    start: int
    """Position of its first row."""
    num_logit_rows: int
    num_scored: int
    """The first so many of the logit rows are log-probs of the prompt, rows `start` and on."""
    samples: bool
    """Whether the last row samples a token that the host does not know yet."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A planned step: what the device is told, and for whom."""

    plan: StepPlan
    loads: tuple[SlotLoad, ...]
    """Slots to fill before the step."""
    parts: tuple[StepPart, ...]
    """In the order of the plan's sequences."""
    admitted: tuple[Request, ...]
    """The requests that fill the slots, in the order of `loads`."""


class Chunk(NamedTuple):
    """The next rows of a request: how many, and how many of them do what."""

    num_tokens: int
    num_logit_rows: int
    num_scored: int


class StepBuilder:
    """Collects the parts of one step and keeps it within a shape that is compiled.

    A row and a logit row stay reserved for each running request that has not been asked yet
    (`num_reserved`), so that a long prompt never holds up the requests that only decode.
    """

    def __init__(self, limits: EngineLimits, budget: StepShape, max_chunk: int) -> None:
        self._limits = limits
        self._rows_left = budget.rows
        self._logit_rows_left = budget.logit_rows
        self._sequences_left = budget.sequences
        self._chunk_left = max_chunk
        self.num_reserved = 0
        self._sequences: list[SequencePlan] = []
        self._parts: list[StepPart] = []
        self._loads: list[SlotLoad] = []
        self._admitted: list[Request] = []
        self.grants: list[PageGrant] = []

    @property
    def full(self) -> bool:
        """Whether no request can be admitted to this step."""
        return not (self._rows_left and self._logit_rows_left and self._sequences_left and self._chunk_left)

    def next_chunk(self, request: Request, num_available: int) -> Chunk:
        """The most that the request can compute in this step, of the `num_available` tokens with pages."""
        start = request.num_computed
        todo = request.num_uncomputed
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

    def add(self, request: Request, chunk: Chunk) -> None:
        """Put the request's next rows into the step, and count them as computed."""
        num_tokens, num_logit_rows, num_scored = chunk
        todo = request.num_uncomputed
        samples = num_tokens == todo
        self._rows_left -= num_tokens
        self._logit_rows_left -= num_logit_rows
        self._sequences_left -= 1
        if todo > 1:
            self._chunk_left -= num_tokens
        if num_tokens == num_logit_rows == 1:
            if request.decode_plan is None:
                request.decode_plan = SequencePlan(request.slot, 1)
            self._sequences.append(request.decode_plan)
        else:
            self._sequences.append(SequencePlan(request.slot, num_tokens, num_logit_rows))
        self._parts.append(StepPart(request, request.num_computed, num_logit_rows, num_scored, samples))
        request.num_computed += num_tokens
        request.num_pending += samples
        request.submission.num_scored += num_scored

    def load(self, request: Request) -> None:
        """Fill the request's slot before the step."""
        submission = request.submission
        self._admitted.append(request)
        self._loads.append(
            SlotLoad(
                slot=request.slot,
                tokens=submission.prompt + request.output,
                num_prompt_tokens=len(submission.prompt),
                num_computed=request.num_computed,
                pages=tuple(tuple(pages) for pages in request.table.pages),
                params=submission.params,
                seed=submission.seed,
                sample_index=request.sample_index,
                eos_token_ids=self._limits.eos_token_ids,
            )
        )

    def build(self) -> ScheduledStep | None:
        """The step in the smallest shape that holds it, or None if it has no rows."""
        if not self._parts:
            return None
        num_rows = sum(sequence.num_tokens for sequence in self._sequences)
        num_logit_rows = sum(sequence.num_logit_rows for sequence in self._sequences)
        num_sequences = len(self._sequences)
        shape = self._limits.fit(num_rows, num_sequences, num_logit_rows, num_rows == num_sequences)
        return ScheduledStep(
            StepPlan.of(self._sequences, self.grants, shape),
            tuple(self._loads),
            tuple(self._parts),
            tuple(self._admitted),
        )
