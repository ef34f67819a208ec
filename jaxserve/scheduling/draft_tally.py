"""What drafting has brought: one answer, and all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

DraftingState = Literal["measuring", "drafting", "no_drafts", "does_not_pay"]
"""Plain steps are being timed; drafts are verified; drafting rests, as there was nothing to draft from; it
rests, as drafts cost more than they bring."""
DRAFTING_STATES: tuple[DraftingState, ...] = ("measuring", "drafting", "no_drafts", "does_not_pay")


@dataclass(slots=True)
class DraftTally:
    """What drafting has brought one answer."""

    num_verifications: int = 0
    """Drafts, of one token or several, that a step has verified."""
    num_drafted: int = 0
    """Their tokens."""
    num_accepted: int = 0
    """Of these, the ones that became part of the answer."""
    seconds_saved: float = 0.0
    """By which the answer came sooner than by plain steps, by what both kinds of step are measured to take;
    below 0 it came later. Steps that compute prompts beside are left out."""

    @property
    def accepted_length(self) -> float:
        """Tokens that a verification has brought, the one that plain decoding brings too included; 0.0 where
        there was none."""
        return accepted_length(self.num_verifications, self.num_accepted)

    @classmethod
    def total(cls, tallies: Iterable[DraftTally]) -> DraftTally:
        """Of several answers to one prompt, which come side by side: the saved time is their mean."""
        listed = list(tallies)
        return cls(
            sum(one.num_verifications for one in listed),
            sum(one.num_drafted for one in listed),
            sum(one.num_accepted for one in listed),
            sum(one.seconds_saved for one in listed) / max(len(listed), 1),
        )


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """What drafting has brought so far, and how it stands."""

    num_verifications: int = 0
    """Drafts, of one token or several, that a step has verified."""
    num_drafted: int = 0
    """Their tokens."""
    num_accepted: int = 0
    """Of these, the ones that became part of answers."""
    drafted_seconds: float = 0.0
    """What steps took that decoded with drafts, or had waited for some, and did nothing else, where plain
    ones had been measured."""
    plain_seconds: float = 0.0
    """What plain steps would have taken for as many tokens, by what they take for as many answers."""
    drafter: str = ""
    """What drafts; "" where nothing does."""
    state: DraftingState = "measuring"
    """Whether drafts are verified now, and why not."""

    @property
    def seconds_saved(self) -> float:
        """Of decoding, against plain steps; below 0 it has been lost. As in `DraftTally`, but for all."""
        return self.plain_seconds - self.drafted_seconds

    @property
    def accepted_length(self) -> float:
        """As in `DraftTally`."""
        return accepted_length(self.num_verifications, self.num_accepted)


def accepted_length(num_verifications: int, num_accepted: int) -> float:
    """Tokens that a verification brings on average; 0.0 where there was none."""
    return 1.0 + num_accepted / num_verifications if num_verifications else 0.0
