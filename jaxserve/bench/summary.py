"""A cell in a few figures: over its repeats, and of a scenario what it is about in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from jaxserve.bench.result import CellResult, CellRun, RequestRecord, Result

_COLUMNS = "{:44} {:>14} {:>5} {:>15} {:>6} {:>13} {:>5} {:>15} {:>6}"
_HEADINGS = ("cell", "goodput/s", "kept", "TTFT ms", "p99", "TPOT ms", "p99", "output tok/s", "cached")
_DIGITS = re.compile(r"\d+")
_MAX_ERRORS = 3
_MAX_ERROR_LEN = 160


class Over(NamedTuple):
    """One figure over the repeats of a cell."""

    mean: float
    low: float
    high: float

    @classmethod
    def repeats(cls, values: Sequence[float]) -> Over:
        return cls(fmean(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """The mean, and half of the range where there is one."""
        spread = (self.high - self.low) / 2
        return f"{self.mean:.{digits}f}" + (f" ±{spread:.{digits}f}" if spread else "")


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """The figures of a cell that was run at least once; times in milliseconds."""

    goodput: Over
    """Requests a second that kept both limits."""
    kept: float
    """Their share of those whose clients waited for the end."""
    ttft: Over
    ttft_p99: float
    tpot: Over
    tpot_p99: float
    output_rate: Over
    """Tokens a second."""
    cached: float
    """Share of the prompts' tokens that the server had computed before."""

    def texts(self) -> tuple[str, ...]:
        """The figures as they are shown, in the order of the fields."""
        return (
            self.goodput.text(2),
            f"{self.kept:.0%}",
            self.ttft.text(1),
            f"{self.ttft_p99:.0f}",
            self.tpot.text(1),
            f"{self.tpot_p99:.0f}",
            self.output_rate.text(1),
            f"{self.cached:.0%}",
        )

    @classmethod
    def of(cls, cell: CellResult, ttft: float, tpot: float) -> CellSummary:
        """`ttft`, `tpot`: limits in seconds."""
        runs, requests = cell.runs, [one for run in cell.runs for one in run.requests]
        num_prompt = sum(run.figures["total_input_tokens"] or 0 for run in runs)
        cached = sum(one.cached_tokens for one in requests if one.answered)
        return cls(
            goodput=Over.repeats([run.goodput(ttft, tpot) for run in runs]),
            kept=cell.kept(ttft, tpot),
            ttft=_over(runs, "median_ttft_ms"),
            ttft_p99=_over(runs, "p99_ttft_ms").mean,
            tpot=_over(runs, "median_tpot_ms"),
            tpot_p99=_over(runs, "p99_tpot_ms").mean,
            output_rate=_over(runs, "output_throughput"),
            cached=cached / num_prompt if num_prompt else 0.0,
        )


def table(result: Result, ttft: float, tpot: float) -> str:
    """The result for a reader: a line for each cell, what scenarios are about, and the checks."""
    return "\n".join(_lines(result, ttft, tpot))


def remarks(cell: CellResult) -> list[str]:
    """What a scenario is about, as found in all of its repeats; nothing of the matrix."""
    if not cell.runs:
        return []
    requests = [one for run in cell.runs for one in run.requests]
    found = [*_group_remarks(requests), *_REMARKS.get(cell.kind, lambda _: [])(cell)]
    routes = Counter(one.route for one in requests if one.answered and one.route)
    if len(routes) > 1:
        found.append("answered by " + ", ".join(f"{name} ({count})" for name, count in routes.most_common()))
    return found + _error_remarks(requests)


def _error_remarks(requests: Sequence[RequestRecord]) -> list[str]:
    """The commonest errors; those that differ in their numbers alone are one."""
    examples = {_DIGITS.sub("#", one.error): one.error for one in requests if one.error}
    counts = Counter(_DIGITS.sub("#", one.error) for one in requests if one.error)
    commonest = counts.most_common(_MAX_ERRORS)
    return [f"{count} failed: {examples[kind][:_MAX_ERROR_LEN]}" for kind, count in commonest]


def inversions(run: CellRun) -> int:
    """Urgent requests whose first token came after that of a patient one that was sent later."""
    urgent, patient = (
        [one for one in run.requests if one.group == group and one.answered]
        for group in ("urgent", "patient")
    )
    return sum(
        any(late.start > one.start and late.start + late.ttft < one.start + one.ttft for late in patient)
        for one in urgent
    )


def _lines(result: Result, ttft: float, tpot: float) -> Iterator[str]:
    yield f"limits: first token {ttft:g} s, each further one {tpot:g} s; ± is half of the repeats' range"
    yield _COLUMNS.format(*_HEADINGS)
    for cell in result.cells:
        if not cell.runs:
            continue
        one = CellSummary.of(cell, ttft, tpot)
        yield _COLUMNS.format(cell.name, *one.texts())
        yield from (f"    {line}" for line in remarks(cell))
    yield from (f"left out: {label}" for label in result.left_out)
    yield from (f"{'passed' if one.passed else 'FAILED'} {one.name}: {one.detail}" for one in result.checks)


def _over(runs: Sequence[CellRun], name: str) -> Over:
    return Over.repeats([run.figures[name] or 0.0 for run in runs])


def _group_remarks(requests: Sequence[RequestRecord]) -> Iterator[str]:
    stayed = [one for one in requests if one.group and not one.cancelled]
    for group in dict.fromkeys(one.group for one in stayed):
        members = [one for one in stayed if one.group == group]
        answered = [one.ttft for one in members if one.answered]
        times = ""
        if answered:
            median, high = np.percentile(answered, [50, 99])
            times = f", first token in {median:.3f} s (99 % within {high:.3f} s)"
        yield f"{group}: {len(answered)} of {len(members)} answered{times}"


def _of_cancellations(cell: CellResult) -> list[str]:
    left = sum(one.cancelled for run in cell.runs for one in run.requests)
    waits = [run.idle_seconds for run in cell.runs if run.idle_seconds is not None]
    rid = f"; the server had nothing open {max(waits):.2f} s after the last answer" if waits else ""
    return [f"{left} were cancelled{rid}"]


def _of_retries(cell: CellResult) -> list[str]:
    requests = [one for run in cell.runs for one in run.requests]
    tries, again = sum(one.attempts for one in requests), sum(one.attempts > 1 for one in requests)
    return [f"{len(requests)} requests took {tries} tries; {again} came again"]


def _of_inversions(cell: CellResult) -> list[str]:
    urgent = sum(one.group == "urgent" for run in cell.runs for one in run.requests)
    overtaken = sum(map(inversions, cell.runs))
    return [f"{overtaken} of {urgent} urgent ones were overtaken by a later patient one"]


def _of_failure(cell: CellResult) -> list[str]:
    at = cell.settings["at"]
    waits = [
        min((one.start for one in run.requests if one.answered and one.start >= at), default=None)
        for run in cell.runs
    ]
    recovered = [wait - at for wait in waits if wait is not None]
    if len(recovered) < len(waits):
        return [f"in {len(waits) - len(recovered)} of {len(waits)} repeats nothing was answered afterwards"]
    return [f"{max(recovered):.2f} s after the fault at most, a request was sent that was answered"]


_REMARKS = {
    "cancellations": _of_cancellations,
    "retries": _of_retries,
    "inversions": _of_inversions,
    "failure": _of_failure,
}
