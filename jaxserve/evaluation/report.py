"""The outcome of an evaluation: as a table, as JSON, and as passed or not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxserve.evaluation.measures import Measure, SliceReport, Verdict

MIB = 2**20
_COLUMNS = "{:28} {:>7} {:17} {:>10} {:>10} {:>10}  {}"


@dataclass(frozen=True, kw_only=True)
class SideReport:
    """What one of the models was, weighed and reached."""

    name: str
    compute_format: str
    kv_format: str
    precision: str
    """Of weights and activations, as a server calls it."""
    options: Mapping[str, Any]
    """Fields of `EngineOptions` that were not left at their defaults."""
    weight_bytes: int
    kv_bytes_per_token: float
    scored_tokens_per_second: float | None = None
    """Of its forward passes and logits while reading texts."""
    answered_tokens_per_second: float | None = None
    """Of all answers, batched; reading the prompts takes part of the time."""


@dataclass(frozen=True)
class NeedleCell:
    """One cell of the retrieval grid."""

    length: int
    depth: float
    model: bool
    reference: bool


@dataclass(frozen=True)
class AnswerPair:
    """What both models said to one prompt; in the JSON alone."""

    source: str
    slice: str
    model: str
    reference: str


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """Everything that an evaluation found."""

    model: SideReport
    reference: SideReport
    slices: Sequence[SliceReport]
    verdicts: Sequence[Verdict]
    needle_grid: Sequence[NeedleCell] = ()
    answers: Sequence[AnswerPair] = ()
    not_judged: Mapping[str, int] = field(default_factory=dict[str, int])
    """Instructions that there is no check for, with their number."""

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def passed(self) -> bool:
        """Whether every floor holds."""
        return not self.failures

    def to_json(self) -> str:
        """The report as a JSON object; null for what is no finite number."""
        verdicts = [
            {
                "floor": str(verdict.floor),
                "slice": verdict.slice,
                "value": verdict.value,
                "passed": verdict.passed,
                "missed_by": verdict.missed_by,
            }
            for verdict in self.verdicts
        ]
        fields = asdict(self) | {"verdicts": verdicts, "passed": self.passed}
        return json.dumps(_finite(fields), indent=2, allow_nan=False)

    def table(self) -> str:
        """The report for a reader."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield _side_line("model", self.model)
        yield _side_line("reference", self.reference)
        yield ""
        yield _COLUMNS.format("slice", "size", "measure", "model", "reference", "gated", "floor")
        for report in self.slices:
            for name, measure in report.measures.items():
                yield self._measure_line(report, name, measure)
        if self.needle_grid:
            yield from ("", *_grid_lines(self.needle_grid))
        if self.not_judged:
            named = ", ".join(f"{name} ({count})" for name, count in sorted(self.not_judged.items()))
            yield f"\nnot judged: {named}"
        if self.verdicts:
            held = len(self.verdicts) - len(self.failures)
            yield f"\n{'passed' if self.passed else 'FAILED'}: {held} of {len(self.verdicts)} floors hold"

    def _measure_line(self, report: SliceReport, name: str, measure: Measure) -> str:
        marks = [
            f"{verdict.floor.bound:g} {'ok' if verdict.passed else 'MISSED'}"
            for verdict in self.verdicts
            if verdict.slice == report.name and verdict.floor.measure == name
        ]
        figures = (_figure(value) for value in (measure.model, measure.reference, measure.value))
        return _COLUMNS.format(report.name, report.size, name, *figures, ", ".join(marks)).rstrip()


def _side_line(role: str, side: SideReport) -> str:
    options = {name: value for name, value in side.options.items() if name not in {"dtype", "kv_format"}}
    speeds = [
        f", {speed:.1f} tokens/s {doing}"
        for speed, doing in (
            (side.scored_tokens_per_second, "scored"),
            (side.answered_tokens_per_second, "answered"),
        )
        if speed is not None
    ]
    named = "".join(f", {name} {value}" for name, value in options.items())
    return (
        f"{role:9} {side.name}: {side.compute_format}, KV {side.kv_format}{named}; weights "
        f"{side.weight_bytes / MIB:.1f} MiB, KV {side.kv_bytes_per_token:.0f} bytes a token{''.join(speeds)}"
    )


def _grid_lines(cells: Sequence[NeedleCell]) -> Iterator[str]:
    """Lengths down, depths across; M for found by the model, R by the reference."""
    depths = sorted({cell.depth for cell in cells})
    found = {(cell.length, cell.depth): cell for cell in cells}
    yield "needles found by model (M) and reference (R), by length and depth"
    yield "".join(["       ", *(f"{depth:>7.0%}" for depth in depths)])
    for length in dict.fromkeys(cell.length for cell in cells):
        row = [found[length, depth] for depth in depths]
        marks = [f"{'M' if cell.model else '-'}{'R' if cell.reference else '-'}" for cell in row]
        yield "".join([f"{length:>7}", *(f"{mark:>7}" for mark in marks)])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _finite(value: Any) -> Any:
    """A JSON value with None in place of numbers that JSON cannot write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
