"""Whether drafting goes on or rests, by what steps are measured to take with it and without."""

from __future__ import annotations

from jaxserve.plan import EngineLimits, StepShape
from jaxserve.scheduling.draft_tally import DraftingState
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.step import ScheduledStep
from jaxserve.speculation.budget import Debt, DraftingBudget
from jaxserve.speculation.gain import Slowness, StepKind, StepSeconds

_NUM_TIMED = 5
"""Plain steps in a row where none of their size has been timed. The first follows one that was waited for, is
not overlapped, and does not count."""
_FIRST_UNTIMED, _LONGEST_UNTIMED = 8, 128
"""Steps after which plain ones are timed again, twice as many each time: how long they take by those that are
waited for is soon to be known well, and seldom changes."""


class DraftPace:
    """Times steps, and keeps the accounts of what drafting saves.

    A step is *waited* for if it was planned when nothing was in flight, so that drafts could follow the last
    tokens; the other steps overlap, and are what drafting is held against.
    """

    def __init__(self, limits: EngineLimits, *, adaptive: bool) -> None:
        self._limits = limits
        self._adaptive = adaptive
        self._shapes: dict[tuple[int, int], StepShape] = {}
        """By the sequences that decode and their drafts."""
        self._budget = DraftingBudget()
        self._debt = Debt()
        slowness = Slowness()
        self._plain = StepSeconds(slowness)
        """Of steps that were not waited for."""
        self._waited = StepSeconds(slowness)
        self._num_to_time = _NUM_TIMED if adaptive else 0
        self._follows_waited = False
        """Whether the step before the one just collected was waited for."""
        self._num_untimed = 0
        """Steps waited for since plain ones have been timed."""
        self._most_untimed = _FIRST_UNTIMED
        """Of these before they are timed again."""
        self._had_drafts = False
        """Whether there were any since drafting last began."""
        self._share = 0.0
        """Seconds that an accepted draft of the step just collected has saved its answer."""
        self._num_sharing = 1
        self._plain_step = 0.0
        self.drafted_seconds = self.plain_seconds = 0.0
        """See `SpeculationStatistics`."""

    @property
    def active(self) -> bool:
        """Whether the next step is to have drafts, and so to wait for the one before it."""
        return not self._num_to_time and (self._budget.open or not self._adaptive)

    @property
    def state(self) -> DraftingState:
        if self.active:
            return "drafting"
        if self._num_to_time and self._budget.open:
            return "measuring"
        return "does_not_pay" if self._had_drafts else "no_drafts"

    def begin(self, num_decoding: int) -> bool:
        """A step is planned; return whether it may have drafts, beside so many rows of known tokens."""
        if not self.active:
            self._num_to_time = max(0, self._num_to_time - 1)
            return False
        if not self._adaptive:
            return True
        self._num_untimed += 1
        unknown = self._plain.typical(self.plain_kind(num_decoding)) is None
        if unknown or self._num_untimed > self._most_untimed:
            if not unknown:
                self._most_untimed = min(2 * self._most_untimed, _LONGEST_UNTIMED)
            self._num_to_time, self._num_untimed = _NUM_TIMED - 1, 0
            return False
        return True

    def note_drafts(self) -> None:
        """There are drafts to choose from."""
        self._had_drafts = True

    def shape(self, num_decoding: int, num_drafts: int) -> StepShape | None:
        """Of a step that verifies so many drafts; None where there are none."""
        if not num_drafts:
            return None
        shape = self._shapes.get((num_decoding, num_drafts))
        if shape is None:
            rows = num_decoding + num_drafts
            shape = self._shapes[num_decoding, num_drafts] = self._limits.fit(rows, num_decoding, rows, False)
        return shape

    def seconds(self, num_decoding: int, shape: StepShape | None, num_rounds: int) -> float:
        """What a step is expected to take that verifies drafts in a shape, or for None has none: it was
        waited for all the same."""
        if shape is None:
            kind = self.plain_kind(num_decoding)
            return self._waited.typical(kind) or self._plain.predict(kind)
        return self._waited.predict(StepKind(shape, num_rounds))

    def plain_kind(self, num_decoding: int) -> StepKind:
        """A step without drafts."""
        return StepKind(self._limits.fit(num_decoding, num_decoding, num_decoding, True))

    def observe(self, step: ScheduledStep, num_rounds: int, seconds: float) -> None:
        """A step has been collected so long after the one before, and is about to be committed."""
        plan = step.plan
        kind = StepKind(plan.shape, num_rounds)
        overlapped, self._follows_waited = not step.waited and not self._follows_waited, step.waited
        if plan.reads is not None:
            # What a draft model reads beside serves the steps to come, and they pay for it.
            self._debt.add(max(0.0, seconds - self._waited.predict(kind)))
        paid = self._debt.pay()
        num_drafts = 0 if step.num_drafts is None else int(step.num_drafts.sum())
        self._share = 0.0
        if step.loads or plan.num_rows != len(step.rows) + num_drafts:
            if plan.reads is None:
                self._waited.hint(kind, seconds)  # It computes prompts too.
            return
        each = seconds / plan.num_iterations
        if not step.waited:
            self._observe_plain(kind, each, plan.num_iterations, overlapped=overlapped)
            if paid and each:
                self._budget.settle(-paid / each)
            return
        if plan.reads is None:
            self._waited.observe(kind, each)
        plain = self._plain.typical(self.plain_kind(step.most_sampling))
        if plain:
            self._share, self._plain_step, self._num_sharing = plain, plain, len(step.rows)
            self.drafted_seconds += seconds
            self.plain_seconds += plain * plan.num_iterations
            # Held against drafting is what such steps take: a pause of the machine, or the first of its kind,
            # which warms up, says nothing of the next ones.
            usual = self._waited.predict(kind) * plan.num_iterations
            alone = plain * plan.num_iterations
            self._save(step.cohort.requests, alone - seconds, counted=alone - usual - paid)

    def _observe_plain(self, kind: StepKind, seconds: float, num_steps: int, *, overlapped: bool) -> None:
        plain = self._plain.typical(kind)
        if overlapped:
            self._plain.observe(kind, seconds)
            # No step that is waited for takes less, so none with more rows is taken to be for nothing.
            self._waited.hint(kind, plain or seconds)
        elif plain and (waited := self._waited.typical(kind)):
            # Nothing overlapped with it, which is the price of having drafted before.
            self._budget.settle(min(0.0, 1.0 - waited / plain))
        self._earn(num_steps)

    def accept(self, requests: list[Request]) -> None:
        """Drafts of the step just observed have become tokens of these answers."""
        if self._share:
            self.plain_seconds += self._share * len(requests) / self._num_sharing
            self._save(requests, self._share)

    def _save(self, requests: list[Request], seconds: float, *, counted: float | None = None) -> None:
        """Each of these answers is so much ahead of plain decoding. Their share of it counts for drafting or
        against it, or else what is given."""
        for request in requests:
            request.drafts.seconds_saved += seconds
        share = seconds * len(requests) / self._num_sharing
        self._budget.settle((share if counted is None else counted) / self._plain_step)

    def _earn(self, num_steps: int) -> None:
        rested = not self._budget.open
        self._budget.earn(num_steps)
        if rested and self._budget.open:
            self._had_drafts = False
