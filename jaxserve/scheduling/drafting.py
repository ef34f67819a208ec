"""Which running requests verify drafts in a step, and of how many tokens.

A request that drafts waits for its last token to arrive before it computes more, since that is what its
drafts follow: it takes part in every step of a plain loop, and in every second one of an overlapped loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.plan import EngineLimits, IntArray
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.running_pages import RunningPages
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.step import Drafts, ScheduledStep, StepBuilder
from jaxserve.speculation import Drafter, Speculation


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """What drafting has brought. Totals count from the beginning."""

    num_verifications: int = 0
    """Drafts, of one token or several, that a step has verified."""
    num_drafted: int = 0
    """Their tokens."""
    num_accepted: int = 0
    """Of these, the ones that became part of answers."""


@dataclass(slots=True)
class _Follower:
    """A request's drafter, and how much of the answer it has been told."""

    drafter: Drafter
    num_told: int = 0


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
        self._table = table
        self._pages = pages
        self._followers: dict[Request, _Follower] = {}
        self._num_verifications = self._num_drafted = self.num_accepted = 0

    @property
    def statistics(self) -> SpeculationStatistics:
        return SpeculationStatistics(self._num_verifications, self._num_drafted, self.num_accepted)

    def fill(self, step: StepBuilder) -> None:
        """Let those of the step that decode verify drafts, where there are rows and pages to spare."""
        decoding = step.decoding
        room = self._room(decoding)
        places = room.nonzero()[0].tolist()
        counts, tokens = np.zeros(len(decoding), np.int32), list[int]()
        for number, place in enumerate(places):
            # What one leaves of its part, the next ones may have.
            part = (step.num_spare - len(tokens)) // (len(places) - number)
            if part > 0:
                draft = self._propose(self._table.at(decoding[place]), min(int(room[place]), part))
                counts[place] = len(draft)
                tokens += draft
        if tokens and self._pages.lend(decoding, counts + 1):
            step.verify(Drafts(counts, np.array(tokens, np.int32)))
            self._num_verifications += int(np.count_nonzero(counts))
            self._num_drafted += len(tokens)

    def mark(self) -> None:
        """Before a step is built: whose samples are to be seen before more is planned."""
        self._table.drafting[:] = ~self._table.gated

    def resume(self, step: ScheduledStep) -> None:
        """The step has been collected: what it sampled is about to be seen."""
        cohort, table = step.cohort, self._table
        seen = (table.serial[cohort.slots] == cohort.serials) & ~table.gated[cohort.slots]
        table.held[cohort.slots[seen]] = False

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._followers.pop(request, None)

    def _room(self, decoding: IntArray) -> IntArray:
        """Drafts that each slot could verify: they follow what has arrived, and leave room for one more."""
        table = self._table
        left = table.max_known[decoding] - table.known[decoding] - 1
        room = np.minimum(left, self._speculation.max_drafts)
        room[table.gated[decoding] | (table.pending[decoding] > 0)] = 0
        return room

    def _propose(self, request: Request, max_tokens: int) -> list[int]:
        follower = self._followers.get(request)
        if follower is None:
            follower = self._followers[request] = _Follower(self._speculation.drafter())
            new = request.submission.prompt + request.output
        else:
            new = request.output[follower.num_told :]
        follower.num_told = len(request.output)
        return follower.drafter.propose(new, max_tokens)
