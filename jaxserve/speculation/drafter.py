"""What drafts, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.speculation.ngram import NgramDrafter


class Drafter(Protocol):
    """Follows one text and guesses how it goes on. A wrong guess costs time and never a token."""

    @property
    def grade(self) -> int:
        """How well founded the latest guess is, on a scale of its own: what is learnt of guesses is learnt
        for each grade."""
        ...

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Guess what comes next.

        Args:
            tokens: what the text has gained since the last call; the first time, all of it.
            max_tokens: the most that is of use, at least 1.

        Returns up to `max_tokens` tokens of the vocabulary; none where there is nothing to go by.
        """
        ...


class EngineDrafter:
    """Leaves the guesses to the engine, which must be one that drafts itself."""

    grade = 0

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """As `Drafter.propose`: places for as many drafts as are wanted."""
        # Whoever only reads names, as the command line does, is spared numpy.
        from jaxserve.plan import ENGINE_DRAFT

        return [ENGINE_DRAFT] * max_tokens


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How answers are drafted. Raises ValueError if a number is not what its field says."""

    drafter: Callable[[], Drafter]
    """Makes the drafter of one answer."""
    max_drafts: int
    """Most drafts of one answer in a step, from 1 up."""
    adaptive: bool = True
    """Whether drafts are verified only where that pays, by what is measured; else wherever there are any."""
    name: str = "drafts"
    """What drafts, for metrics and receipts."""
    shared_tokens: int = 0
    """Of answers that have ended, how many tokens are kept to draft others of the same tenant or namespace
    from, beside their own text; 0 for none. Only for a `drafter` that is NgramDrafter."""

    @property
    def in_engine(self) -> bool:
        """Whether the engine drafts."""
        return self.drafter is EngineDrafter

    def __post_init__(self) -> None:
        if self.max_drafts < 1:
            raise ValueError(f"max_drafts {self.max_drafts} is below 1")
        if self.shared_tokens < 0 or (self.shared_tokens and self.drafter is not NgramDrafter):
            raise ValueError(
                f"shared_tokens {self.shared_tokens}: from 0 up, and 0 unless NgramDrafter drafts"
            )
