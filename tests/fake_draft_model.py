"""The fake engine with a draft model, which must have read all that comes before what it guesses."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from jaxserve.plan import EngineLimits, StepHandle, StepPlan
from tests.fake_engine import FakeEngine, FakeEngineError
from tests.fake_sequence import FakeSequence, sample


class FakeDraftingEngine(FakeEngine):
    """What the draft model reads goes to the page of the token, as a digest of the text up to it."""

    def __init__(self, limits: EngineLimits, *, num_reads: int = 8, errors: float = 0.2) -> None:
        """`num_reads`: tokens that it reads at once; `errors`: of its guesses."""
        super().__init__(replace(limits, drafts_itself=True, draft_reads=num_reads))
        self._group = limits.windows.index(0)
        self._held: dict[tuple[int, int], int] = {}
        """By (page, offset)."""
        self._errors = errors
        self._random = Random(0)
        self.num_read = 0
        """Tokens that were read apart from drafts."""

    def dispatch(self, plan: StepPlan) -> StepHandle:
        if plan.reads is not None:
            self._read_before(plan)
        if plan.unread is not None:
            plan = self._draft(plan)
        return super().dispatch(plan)

    def _read_before(self, plan: StepPlan) -> None:
        assert plan.reads is not None
        num_tokens = int(plan.reads[:, 2].sum())
        _require(0 < num_tokens <= self.limits.draft_reads, f"{num_tokens} tokens are read at once")
        _require(len(set(plan.reads[:, 0].tolist())) == len(plan.reads), "a slot is read twice")
        self.num_read += num_tokens
        for slot, first, count in plan.reads.tolist():
            sequence = self._slots[slot]
            _require(first + count <= sequence.num_computed, f"slot {slot} is read beyond what is computed")
            self._read(sequence, self._slots[slot].tables[self._group], first, first + count)

    def _draft(self, plan: StepPlan) -> StepPlan:
        """The plan with guesses in place of what is asked for."""
        assert plan.unread is not None
        assert plan.drafts is not None
        drafts, ends = plan.drafts.copy(), np.cumsum(plan.num_logit_rows).tolist()
        for part, end, unread in zip(plan.sequences, ends, plan.unread.tolist(), strict=True):
            sequence, num_known = self._slots[part.slot], len(self._slots[part.slot].tokens)
            table = sequence.tables[self._group] | {
                grant.index: grant.page
                for grant in plan.page_grants
                if (grant.group, grant.slot) == (self._group, part.slot)
            }
            asked = [row for row in range(end - part.num_logit_rows, end) if drafts[row] != -1]
            _require(not asked or 0 <= unread <= 1, f"slot {part.slot} drafts with {unread} tokens unread")
            first = sequence.num_computed - unread
            for place in range(max(len(asked), 1) if unread >= 0 else 0):
                self._read(sequence, table, first, sequence.num_computed + place + 1)
                first = sequence.num_computed + place + 1
                if asked:
                    drafts[asked[place]] = self._guess(sequence)
                    sequence.append(int(drafts[asked[place]]))
            sequence.cut(num_known)
        return replace(plan, drafts=drafts)

    def _guess(self, sequence: FakeSequence) -> int:
        vocab = self.limits.vocab_size
        if self._random.random() < self._errors:
            return self._random.randrange(vocab)
        return sample(sequence, len(sequence.tokens) - 1, vocab)

    def _read(self, sequence: FakeSequence, table: dict[int, int], first: int, end: int) -> None:
        """Read the tokens from `first` on; those before must have been."""
        for position in range(end):
            index, offset = divmod(position, self.limits.page_size)
            _require(index in table, f"page {index} is read from and was never granted")
            place = table[index], offset
            if position >= first:
                self._held[place] = sequence.histories[position]
            found = self._held.get(place)
            _require(found == sequence.histories[position], f"position {position} has not been read")


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise FakeEngineError(complaint)
