"""Which running requests verify drafts in a step, and of how many tokens.

Drafts follow tokens that have arrived. So while drafting pays, no step is planned before the last one has
been collected; while it does not, steps overlap as ever, and drafting is tried again now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from jaxserve.plan import EngineLimits, IntArray
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.running_pages import RunningPages
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.step import Drafts, ScheduledStep, StepBuilder
from jaxserve.speculation import Drafter, Speculation
from jaxserve.speculation.gain import Acceptance, StepSeconds, worthwhile_counts

_FIRST_GUESS = 0.5
"""How likely a draft is accepted, before any has been verified."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 4, 128
"""Steps until drafting is tried again; twice as many each time that it does not pay."""


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """What drafting has brought. Totals count from the beginning."""

    num_verifications: int = 0
    """Drafts, of one token or several, that a step has verified."""
    num_drafted: int = 0
    """Their tokens."""
    num_accepted: int = 0
    """Of these, the ones that became part of answers."""
    drafted_seconds: float = 0.0
    """What steps took that decoded with drafts and did nothing else, where plain ones had been measured."""
    plain_seconds: float = 0.0
    """What plain steps would have taken for as many tokens, by what they take for as many answers."""


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
    acceptance: Acceptance = field(default_factory=Acceptance)


class _Proposal(NamedTuple):
    """What could be verified of one request."""

    place: int
    """In the step."""
    follower: _Follower
    tokens: list[int]


class Drafting:
    """The drafters of the running requests. One that is preempted keeps its own."""

    def __init__(
        self, speculation: Speculation, limits: EngineLimits, table: SlotTable, pages: RunningPages
    ) -> None:
        """Raises ValueError for more drafts than the engine's steps take."""
        if speculation.max_drafts > limits.max_drafts:
            raise ValueError(
                f"max_drafts {speculation.max_drafts}: the engine verifies at most {limits.max_drafts}"
            )
        self._speculation = speculation
        self._limits = limits
        self._table = table
        self._pages = pages
        self._followers: dict[Request, _Follower] = {}
        self._acceptance = Acceptance()
        self._seconds = StepSeconds()
        self._pays = not speculation.adaptive
        self._next_pause = _SHORTEST_PAUSE
        self._pause_left = _SHORTEST_PAUSE if speculation.adaptive else 0
        self._num_verifications = self._num_drafted = self._num_accepted = 0
        self._drafted_seconds = self._plain_seconds = 0.0
        self._token_seconds = 0.0
        """What a token of the step that is being collected would take in a plain one; 0 if nobody knows."""

    @property
    def statistics(self) -> SpeculationStatistics:
        return SpeculationStatistics(
            self._num_verifications,
            self._num_drafted,
            self._num_accepted,
            self._drafted_seconds,
            self._plain_seconds,
        )

    @property
    def active(self) -> bool:
        """Whether the next step is to have drafts, and so to wait for the one before it."""
        return not self._pause_left

    def fill(self, step: StepBuilder) -> None:
        """Let those of the step that decode verify drafts, where that pays and there are rows and pages."""
        decoding = step.decoding
        if not len(decoding):
            return
        if self._pause_left:
            self._pause_left -= 1
            return
        proposals = self._propose(decoding)
        counts = self._choose(proposals, step)
        if counts is None:
            self._rest(_SHORTEST_PAUSE)
        elif not counts.any():
            self._rest(self._next_pause)
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        else:
            self._verify(step, proposals, counts)

    def accept(self, requests: list[Request]) -> None:
        """A draft of each of these was accepted."""
        self._num_accepted += len(requests)
        self._plain_seconds += self._token_seconds * len(requests)
        for request in requests:
            self._followers[request].num_accepted += 1

    def observe(self, step: ScheduledStep, seconds: float) -> None:
        """A step has been collected so long after the one before; from one with prompts nothing is learnt."""
        num_drafts = 0 if step.num_drafts is None else int(step.num_drafts.sum())
        self._token_seconds = 0.0
        if not step.loads and step.plan.num_rows == len(step.rows) + num_drafts:
            self._seconds.observe(step.plan.shape, seconds / step.plan.num_iterations)
            if num_drafts:
                self._weigh(len(step.rows), seconds)

    def _weigh(self, num_decoding: int, seconds: float) -> None:
        """Set a step with drafts against plain ones; `accept` adds what each accepted draft would take."""
        plain = self._seconds.measured(self._limits.fit(num_decoding, num_decoding, num_decoding, True))
        if plain is not None:
            self._drafted_seconds += seconds
            self._plain_seconds += plain
            self._token_seconds = plain / num_decoding

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._followers.pop(request, None)

    def _propose(self, decoding: IntArray) -> list[_Proposal]:
        """Drafts for those that decode: they follow what has arrived, and leave room for one more token."""
        table = self._table
        room = np.minimum(table.max_known[decoding] - table.known[decoding] - 1, self._speculation.max_drafts)
        room[table.gated[decoding] | (table.pending[decoding] > 0)] = 0
        proposals: list[_Proposal] = []
        for place in room.nonzero()[0].tolist():
            request = table.at(decoding[place])
            follower = self._followers.get(request)
            if follower is None:
                follower = self._followers[request] = _Follower(self._speculation.drafter())
                new = request.submission.prompt + request.output
            else:
                new = request.output[follower.num_told :]
            self._learn(follower)
            follower.num_told = len(request.output)
            tokens = follower.drafter.propose(new, int(room[place]))
            if tokens:
                proposals.append(_Proposal(place, follower, tokens))
        return proposals

    def _learn(self, follower: _Follower) -> None:
        if follower.num_drafted:
            for acceptance in (follower.acceptance, self._acceptance):
                acceptance.observe(follower.num_drafted, follower.num_accepted)
            follower.num_drafted = follower.num_accepted = 0

    def _choose(self, proposals: list[_Proposal], step: StepBuilder) -> IntArray | None:
        """How much of each proposal to verify; None where there is nothing or no room for it."""
        if not proposals or step.num_spare < 1:
            return None
        num_decoding = len(step.decoding)

        def seconds(num_drafts: int) -> float:
            rows = num_decoding + num_drafts
            return self._seconds.predict(self._limits.fit(rows, num_decoding, rows, not num_drafts))

        prior = self._acceptance.rate(_FIRST_GUESS)
        adapts = self._speculation.adaptive
        return worthwhile_counts(
            [one.follower.acceptance.rate(prior) for one in proposals],
            [len(one.tokens) for one in proposals],
            step.num_spare,
            # What has not paid is tried as if it did: only so is it found out when it does.
            seconds if adapts and self._pays else lambda _: 1.0,
            num_decoding=num_decoding,
        )

    def _verify(self, step: StepBuilder, proposals: list[_Proposal], counts: IntArray) -> None:
        """Put so much of each proposal into the step, unless its pages would be others'."""
        in_step = np.zeros(len(step.decoding), np.int32)
        in_step[[one.place for one in proposals]] = counts
        if not self._pages.lend(step.decoding, in_step + 1):
            return
        chosen = [one.tokens[:count] for one, count in zip(proposals, counts.tolist(), strict=True)]
        for one, tokens in zip(proposals, chosen, strict=True):
            one.follower.num_drafted = len(tokens)
        step.verify(Drafts(in_step, np.array(list(chain(*chosen)), np.int32)))
        self._num_verifications += int(np.count_nonzero(counts))
        self._num_drafted += int(counts.sum())
        if self._pays:
            self._next_pause = _SHORTEST_PAUSE
        self._pays = True

    def _rest(self, num_steps: int) -> None:
        """Let steps overlap for a while."""
        if self._speculation.adaptive:
            self._pause_left = num_steps
            self._pays = False
