"""What a rule finds: advice with its evidence, nothing, or that it cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from jaxserve.planning.advice.evidence import Evidence

A_SIZE = "SIZE"
"""Stands for the value of an option where nothing that was measured says which: more than now."""


class Question(Enum):
    """The tree, in the order in which it is asked."""

    FITS = "Does it fit?"
    SHARED = "Do requests share prefixes?"
    TOGETHER = "Do requests arrive together, with uneven lengths?"
    MEMORY = "Is KV memory the limit?"
    LATENCY = "Is latency per token the goal?"
    FIGHT = "Do prefill and decode fight?"


@dataclass(frozen=True)
class Setting:
    """Something to change."""

    place: Literal["option", "policy", "request"]
    """An option of `jaxserve serve`, a key of the file that its --policy names, or what clients send."""
    name: str
    """As `--num-slots` or `classes.default.tpot_target`."""
    value: str | float | None = None
    """None leaves the option away that is there now; of a request, says how."""

    def __str__(self) -> str:
        if self.place == "request":
            return f"in requests: {self.value}"
        if self.place == "policy":
            return f"in the --policy file: {self.name} = {self.value:g}"
        return f"jaxserve serve without {self.name}" if self.value is None else f"{self.name} {self.value}"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do, and why."""

    technique: str
    evidence: tuple[str, ...]
    """Sentences with the numbers."""
    trade_off: str
    settings: tuple[Setting, ...]
    """The first that is possible; several where one does not go without the other."""
    watch: tuple[str, ...]
    """Metrics of the server, by which to see whether it was right."""


Judge = Callable[[Evidence], Advice | None]
"""Advice, or None where there is no reason for it. Raises NotMeasured where it cannot be told."""


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong, or better."""

    name: str
    """A few words that call it by its symptom, with dashes."""
    question: Question
    judge: Judge


@dataclass(frozen=True)
class Answer:
    """To one question of the tree."""

    verdict: bool | None
    """None where nobody can tell."""
    because: str
    """The numbers, or what it takes."""
