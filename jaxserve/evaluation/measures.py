"""What an evaluation measures, slice by slice, and the floors that it can be held to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxserve.evaluation.scoring import TokenScores

Sense = Literal["at most", "at least"]

MEASURES: dict[str, tuple[Sense, str]] = {
    "perplexity": ("at most", "the model's perplexity over the reference's"),
    "perplexity-change": ("at most", "by how much that differs from 1, either way"),
    "kl": ("at most", "mean divergence of next-token distributions, KL(reference || model) in nats"),
    "kl-p99": ("at most", "the divergence that 99 % of the tokens stay below"),
    "top1": ("at least", "share of positions where both hold the same token for the most likely"),
    "exact": ("at least", "share of answers that give what was expected"),
    "exact-loss": ("at most", "by how much that is below the reference's share"),
    "schema": ("at least", "share of answers that are JSON and meet their schema"),
    "schema-loss": ("at most", "by how much that is below the reference's share"),
    "instructions": ("at least", "share of the judged instructions that are followed"),
    "instructions-loss": ("at most", "by how much that is below the reference's share"),
    "needle": ("at least", "share of hidden numbers that are found"),
    "needle-loss": ("at most", "by how much that is below the reference's share"),
    "refusals-change": ("at most", "by how much the share of refusals differs from the reference's"),
    "agreement": (
        "at least",
        "tokens equal to the reference's answer before the first difference, as a share",
    ),
    "identical": ("at least", "share of answers that are the reference's, token for token"),
}
"""Each measure: on which side of a floor it has to be, and what it is."""


@dataclass(frozen=True)
class Measure:
    """One figure of a slice."""

    value: float
    """What a floor is compared with."""
    model: float | None = None
    """The figure of each model alone, where each has one."""
    reference: float | None = None


@dataclass(frozen=True)
class SliceReport:
    """The figures of one slice."""

    name: str
    size: int
    unit: str
    """What `size` counts: tokens or prompts."""
    measures: Mapping[str, Measure]


@dataclass(frozen=True)
class Floor:
    """A bound on a measure, in one slice or in all that have it."""

    measure: str
    bound: float
    slice: str | None = None

    @classmethod
    def parse(cls, text: str) -> Floor:
        """From `MEASURE=VALUE` or `SLICE:MEASURE=VALUE`. Raises ValueError, listing the measures."""
        named, equals, value = text.rpartition("=")
        part, _, measure = named.rpartition(":")
        if not equals or measure not in MEASURES:
            raise ValueError(
                f"floor {text!r} is not MEASURE=VALUE or SLICE:MEASURE=VALUE; the measures are "
                f"{', '.join(MEASURES)}"
            )
        try:
            bound = float(value)
        except ValueError:
            bound = math.nan
        if not math.isfinite(bound):
            raise ValueError(f"floor {text!r}: {value!r} is no number")
        return cls(measure, bound, part or None)

    def __str__(self) -> str:
        part = "" if self.slice is None else f"{self.slice}:"
        return f"{part}{self.measure}={self.bound:g}"

    def applies(self, report: SliceReport) -> bool:
        return self.measure in report.measures and self.slice in {None, report.name}


@dataclass(frozen=True)
class Verdict:
    """A floor against one slice."""

    floor: Floor
    slice: str
    value: float

    @property
    def passed(self) -> bool:
        """False for a value that is no number: what cannot be measured has not passed."""
        if MEASURES[self.floor.measure][0] == "at most":
            return self.value <= self.floor.bound
        return self.value >= self.floor.bound

    @property
    def missed_by(self) -> float:
        """How far the value is on the wrong side; 0 if passed."""
        return 0.0 if self.passed else abs(self.value - self.floor.bound)

    def __str__(self) -> str:
        sense = MEASURES[self.floor.measure][0]
        text = f"{self.floor.measure} of {self.slice} is {self.value:.5g}, {sense} {self.floor.bound:g}"
        return text if self.passed else f"{text} asked: missed by {self.missed_by:.3g}"


def judge_floors(floors: Sequence[Floor], slices: Iterable[SliceReport]) -> list[Verdict]:
    """Each floor against each slice that it applies to.

    Raises ValueError for a floor that applies to none: a gate that nothing can fail is a mistake.
    """
    slices = list(slices)
    verdicts: list[Verdict] = []
    for floor in floors:
        held = [report for report in slices if floor.applies(report)]
        if not held:
            measured = sorted({f"{report.name}:{name}" for report in slices for name in report.measures})
            raise ValueError(f"floor {floor}: nothing measures that; measured are {', '.join(measured)}")
        verdicts += [Verdict(floor, part.name, part.measures[floor.measure].value) for part in held]
    return verdicts


def text_slice(name: str, scores: TokenScores) -> SliceReport:
    """The figures of a text."""
    means = [float(np.mean(nll, dtype=np.float64)) for nll in (scores.model_nll, scores.reference_nll)]
    with np.errstate(over="ignore", invalid="ignore"):  # A broken model's are infinite, or no numbers.
        model, reference, ratio = np.exp([*means, means[0] - means[1]]).tolist()
    measures = {
        "perplexity": Measure(ratio, model, reference),
        "perplexity-change": Measure(abs(ratio - 1)),
        "kl": Measure(float(np.mean(scores.kl, dtype=np.float64))),
        "kl-p99": Measure(float(np.quantile(scores.kl, 0.99))),
        "top1": Measure(float(np.mean(scores.agrees))),
    }
    return SliceReport(name, len(scores.kl), "tokens", measures)
