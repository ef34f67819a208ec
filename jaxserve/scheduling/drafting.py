"""Which running requests verify drafts in a step, and of how many tokens.

Drafts follow tokens that have arrived. So while drafting pays, no step is planned before the last one has
been collected; while it does not, steps overlap as ever, and drafting is tried again now and then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from jaxserve.plan import EngineLimits, IntArray, StepShape
from jaxserve.scheduling.draft_pace import DraftPace
from jaxserve.scheduling.draft_reading import DraftReading
from jaxserve.scheduling.draft_tally import SpeculationStatistics
from jaxserve.scheduling.pages import PagePool
from jaxserve.scheduling.prefix_tree_keys import CacheScope
from jaxserve.scheduling.request import COMPLETE, Request
from jaxserve.scheduling.running_pages import RunningPages
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.step import Drafts, ScheduledStep, StepBuilder
from jaxserve.speculation import Drafter, SharedTexts, Speculation
from jaxserve.speculation.gain import Acceptance, worthwhile_counts
from jaxserve.speculation.shared_texts import SharedDrafter

_FIRST_GUESS = 0.5
"""How likely a draft is accepted, before any has been verified."""
_NUM_TRIALS = 3
"""Verifications after each rest that are chosen as if it were as likely as that at least: what was wrong
before would else never be found to be right now."""
_NUM_INDEXED = 64
"""Tokens of ended answers that a step makes findable, and two more for each that runs: they come slower."""


@dataclass(slots=True)
class _Follower:
    """A request's drafter, and how it does."""

    drafter: Drafter
    num_told: int = 0
    """Tokens of the answer that the drafter knows of."""
    num_drafted: int = 0
    """Of the latest verification, until it has been learnt from."""
    num_accepted: int = 0
    """Of these."""
    grade: int = 0
    """Of these."""
    acceptance: defaultdict[int, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))
    """By grade."""


class _Proposal(NamedTuple):
    """What could be verified of one request."""

    place: int
    """In the step."""
    request: Request
    follower: _Follower
    tokens: list[int]


class Drafting:
    """The drafters of the running requests. One that is preempted keeps its own."""

    def __init__(
        self,
        speculation: Speculation,
        limits: EngineLimits,
        table: SlotTable,
        pages: Sequence[RunningPages],
        pool: PagePool,
    ) -> None:
        """`pages`: of each replica; `pool`: of the only one, where the engine has a draft model.

        Raises ValueError for more drafts than the engine's steps take, or if it is to draft and cannot."""
        if speculation.max_drafts > limits.max_drafts:
            raise ValueError(
                f"max_drafts {speculation.max_drafts}: the engine verifies at most {limits.max_drafts}"
            )
        if speculation.in_engine and not limits.drafts_itself:
            raise ValueError(f"speculation {speculation.name!r}: the engine does not draft itself")
        self._speculation = speculation
        self._shared = SharedTexts(speculation.shared_tokens) if speculation.shared_tokens else None
        self._table = table
        self._pages = pages
        self._reading = (
            DraftReading(limits, table, pool) if speculation.in_engine and limits.draft_reads else None
        )
        self._pace = DraftPace(limits, adaptive=speculation.adaptive)
        self._followers: dict[Request, _Follower] = {}
        self._acceptance: defaultdict[int, Acceptance] = defaultdict(Acceptance)
        """Of all answers, by grade."""
        self.trim: Callable[[Request, list[int]], list[int]] | None = None
        """Cuts the drafts of a gated request where its grammar does; where nothing does, it has none."""
        self._trials_left = _NUM_TRIALS
        self._num_verifications = self._num_drafted = self._num_accepted = 0

    @property
    def statistics(self) -> SpeculationStatistics:
        return SpeculationStatistics(
            self._num_verifications,
            self._num_drafted,
            self._num_accepted,
            self._pace.drafted_seconds,
            self._pace.plain_seconds,
            self._speculation.name,
            self._pace.state,
        )

    @property
    def active(self) -> bool:
        """Whether the next step is to have drafts, and so to wait for the one before it."""
        return self._pace.active

    def fill(self, steps: Sequence[StepBuilder]) -> None:
        """Let those that decode verify drafts, where that pays and there are rows and pages.

        `steps`: of each replica its part of the step.
        """
        num_decoding = [len(step.decoding) for step in steps]
        if self._shared is not None:
            self._shared.work(_NUM_INDEXED + 2 * sum(num_decoding))
        if self._reading is not None:
            self._reading.settle()
        if not any(num_decoding):
            return
        if not self._pace.begin(max(num_decoding)):
            self._trials_left = _NUM_TRIALS
            return
        num_before = self._num_verifications
        for step, pages in zip(steps, self._pages, strict=True):
            step.waited = True
            self._fill(step, pages)
        self._trials_left = max(0, self._trials_left - (self._num_verifications - num_before))

    def _fill(self, step: StepBuilder, pages: RunningPages) -> None:
        proposals = self._propose(step)
        if not proposals:
            return
        self._pace.note_drafts()
        if step.num_spare > 0:
            counts = self._choose(proposals, step)
            if counts.any():
                self._verify(step, pages, proposals, counts)

    def accept(self, requests: list[Request]) -> None:
        """A draft of each of these was accepted."""
        self._num_accepted += len(requests)
        for request in requests:
            self._followers[request].num_accepted += 1
            request.drafts.num_accepted += 1
        self._pace.accept(requests)

    def observe(self, step: ScheduledStep, seconds: float) -> None:
        """A step has been collected so long after the one before, and is about to be committed."""
        num_rounds = 0
        if self._speculation.in_engine and step.num_drafts is not None:
            num_rounds = int(step.num_drafts.max())
        self._pace.observe(step, num_rounds, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._followers.pop(request, None)
        terms = request.submission.terms
        if self._shared is not None and terms.cache_write and request.state in COMPLETE:
            self._shared.add(CacheScope.of(terms), request.submission.prompt, request.output)

    def clear_shared(self, scope: CacheScope | None = None) -> None:
        """Draft nothing any more from answers that have ended, or from those of one tenant or namespace."""
        if self._shared is not None:
            self._shared.clear(scope)

    def _new_drafter(self, request: Request) -> Drafter:
        terms = request.submission.terms
        if self._shared is None or not terms.cache_read:
            return self._speculation.drafter()
        return SharedDrafter(self._shared, CacheScope.of(terms))

    def _propose(self, step: StepBuilder) -> list[_Proposal]:
        """Drafts for those that decode: they follow what has arrived, and leave room for one more token."""
        table, decoding = self._table, step.decoding
        room = np.minimum(table.max_known[decoding] - table.known[decoding] - 1, self._speculation.max_drafts)
        room[table.pending[decoding] > 0] = 0
        if self._reading is not None:
            step.reads = self._reading.read_on(decoding, (room > 0) & ~table.gated[decoding])
            room[self._reading.unread(decoding) < 0] = 0
        proposals: list[_Proposal] = []
        for place in room.nonzero()[0].tolist():
            request = table.at(decoding[place])
            follower = self._followers.get(request)
            if follower is None:
                follower = self._followers[request] = _Follower(self._new_drafter(request))
                new = request.submission.prompt + request.output
            else:
                new = request.output[follower.num_told :]
            self._learn(follower)
            follower.num_told = len(request.output)
            tokens = follower.drafter.propose(new, int(room[place]))
            if tokens and request.gated:
                tokens = self.trim(request, tokens) if self.trim else []
            if tokens:
                proposals.append(_Proposal(place, request, follower, tokens))
        return proposals

    def _learn(self, follower: _Follower) -> None:
        if follower.num_drafted:
            for acceptance in (follower.acceptance, self._acceptance):
                acceptance[follower.grade].observe(follower.num_drafted, follower.num_accepted)
            follower.num_drafted = follower.num_accepted = 0

    def _choose(self, proposals: list[_Proposal], step: StepBuilder) -> IntArray:
        """How much of each proposal to verify."""
        num_decoding, in_engine = len(step.decoding), self._speculation.in_engine
        adapts = self._speculation.adaptive

        known: dict[tuple[StepShape | None, int], float] = {}

        def seconds(num_drafts: int, longest: int) -> float:
            if not adapts:
                return 1.0
            kind = self._pace.shape(num_decoding, num_drafts), longest if in_engine else 0
            if kind not in known:
                known[kind] = self._pace.seconds(num_decoding, *kind)
            return known[kind]

        return worthwhile_counts(
            [self._rate(one.follower) for one in proposals],
            [len(one.tokens) for one in proposals],
            step.num_spare,
            seconds,
            num_decoding=num_decoding,
        )

    def _rate(self, follower: _Follower) -> float:
        """How likely a draft just made is accepted if those before it are."""
        grade = follower.drafter.grade
        rate = follower.acceptance[grade].rate(self._acceptance[grade].rate(_FIRST_GUESS))
        return max(rate, _FIRST_GUESS) if self._trials_left else rate

    def _verify(
        self, step: StepBuilder, pages: RunningPages, proposals: list[_Proposal], counts: IntArray
    ) -> None:
        """Put so much of each proposal into the step, unless its pages would be others'."""
        in_step = np.zeros(len(step.decoding), np.int32)
        in_step[[one.place for one in proposals]] = counts
        if not pages.can_lend(step.decoding, in_step + 1):
            return
        pages.lend(step.decoding, in_step + 1)
        chosen = [one.tokens[:count] for one, count in zip(proposals, counts.tolist(), strict=True)]
        for one, tokens in zip(proposals, chosen, strict=True):
            one.follower.num_drafted, one.follower.grade = len(tokens), one.follower.drafter.grade
            one.request.drafts.num_verifications += bool(tokens)
            one.request.drafts.num_drafted += len(tokens)
        step.verify(
            Drafts(in_step, np.array(list(chain(*chosen)), np.int32), self._read_along(step, in_step))
        )
        self._num_verifications += int(np.count_nonzero(counts))
        self._num_drafted += int(counts.sum())

    def _read_along(self, step: StepBuilder, num_drafts: IntArray) -> IntArray | None:
        """As in `StepPlan.unread`, of those that decode."""
        if self._reading is None:
            return None
        unread = self._reading.unread(step.decoding)
        self._reading.read_drafts(step.decoding, unread, num_drafts)
        return unread
