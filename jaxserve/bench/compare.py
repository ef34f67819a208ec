"""Two results at the same limits: which is better where, and where that cannot be told from noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from statistics import fmean, variance

from scipy import stats

from jaxserve.bench.quality import answers_alike
from jaxserve.bench.result import CellResult, Result
from jaxserve.bench.summary import Over

CONFIDENCE = 0.95
"""With which all verdicts of a comparison hold together."""
FEW_REPEATS = 5
"""Two of each leave a t-test one or two degrees of freedom, under which even threefold speed is no proof."""
_COLUMNS = "{:44} {:>15} {:>15} {:>8} {:>7} {:>7}  {}"


class Verdict(Enum):
    """Which of two is better in a cell."""

    A = "A is better"
    B = "B is better"
    EVEN = "no difference that is more than noise"
    NEITHER = "neither keeps the limits"
    UNTOLD = "cannot be told: fewer than two repeats"


@dataclass(frozen=True, kw_only=True)
class CellComparison:
    """One cell of both."""

    name: str
    a: Over
    b: Over
    """Goodput, requests a second."""
    kept_a: float
    kept_b: float
    """Shares of requests that kept the limits."""
    num_repeats: int
    """Of the one that has fewer."""
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """B over A; None where A has none."""
        return self.b.mean / self.a.mean if self.a.mean else None

    def texts(self) -> tuple[str, ...]:
        """The figures as they are shown: goodput of both, their ratio, both shares."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return self.a.text(2), self.b.text(2), ratio, f"{self.kept_a:.0%}", f"{self.kept_b:.0%}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two results, cell by cell."""

    ttft: float
    tpot: float
    """Limits in seconds."""
    cells: Sequence[CellComparison]
    only_one: Sequence[str]
    """Cells that one of the results lacks."""
    differences: Sequence[str]
    """What else the two do not have in common."""
    alike: tuple[int, int]
    """Greedy answers that are the same in both, of how many."""
    a_passed: bool
    b_passed: bool
    """Whether each passed its own checks of quality."""

    def lead(self) -> str:
        """What is compared, and how sure the verdicts are."""
        return (
            f"goodput at {self.ttft:g} s to the first token, {self.tpot:g} s for each further one; "
            f"verdicts hold together with {CONFIDENCE:.0%}"
        )

    def count(self, verdict: Verdict) -> int:
        return sum(cell.verdict is verdict for cell in self.cells)


def compare(a: Result, b: Result, *, ttft: float, tpot: float, anyway: bool = False) -> Comparison:
    """Which of two results is better in which cell.

    A cell's figure is its goodput: requests a second that kept both limits. One is better where Welch's
    t-test over the repeats says so, at a level that is divided among the cells (Bonferroni), so that
    all verdicts together are wrong in one comparison of twenty at most.

    Args:
        a: one result.
        b: the other.
        ttft: limit of the time to the first token, in seconds.
        tpot: limit of the mean time for each further token, in seconds.
        anyway: compare also what was asked otherwise, or on another machine.

    Raises ValueError, saying what differs, for results that cannot be compared; or that share no cell.
    """
    if not (ttft > 0 and tpot > 0):
        raise ValueError(f"limits of {ttft} and {tpot} s: both must be above 0")
    obstacles = list(_obstacles(a, b))
    if obstacles and not anyway:
        raise ValueError(f"not comparable: {'; '.join(obstacles)} (--anyway compares them nevertheless)")
    others = {cell.name: cell for cell in b.cells if cell.runs}
    pairs = [(cell, others[cell.name]) for cell in a.cells if cell.runs and cell.name in others]
    if not pairs:
        raise ValueError("the results have no cell in common")
    shared = {cell.name for cell, _ in pairs}
    names = dict.fromkeys(cell.name for cell in (*a.cells, *b.cells))
    level = (1 - CONFIDENCE) / len(pairs)
    return Comparison(
        ttft=ttft,
        tpot=tpot,
        cells=[_compare_cell(one, other, ttft, tpot, level) for one, other in pairs],
        only_one=[name for name in names if name not in shared],
        differences=[*obstacles, *_differences(a, b)],
        alike=answers_alike(a.cells, b.cells),
        a_passed=a.passed,
        b_passed=b.passed,
    )


def comparison_table(comparison: Comparison) -> str:
    """The comparison for a reader."""
    return "\n".join(_lines(comparison))


def conclusions(comparison: Comparison) -> Iterator[str]:
    """What follows, in sentences."""
    counts = [(verdict, comparison.count(verdict)) for verdict in Verdict]
    yield f"of {len(comparison.cells)} cells: " + ", ".join(f"{n} {one.value}" for one, n in counts if n)
    fewest = min(cell.num_repeats for cell in comparison.cells)
    if comparison.count(Verdict.EVEN) and fewest < FEW_REPEATS:
        yield f"{fewest} repeats tell little from noise: {FEW_REPEATS} or more would tell more"
    alike, total = comparison.alike
    if total:
        yield f"{alike} of {total} greedy answers are the same in both"
    for name, passed in (("A", comparison.a_passed), ("B", comparison.b_passed)):
        if not passed:
            yield f"{name} did not pass its checks of quality: where it is faster, that is no gain"


def _lines(comparison: Comparison) -> Iterator[str]:
    yield comparison.lead()
    yield from (f"differs: {line}" for line in comparison.differences)
    yield _COLUMNS.format("cell", "A /s", "B /s", "B over A", "kept A", "kept B", "")
    for one in comparison.cells:
        yield _COLUMNS.format(one.name, *one.texts(), one.verdict.value)
    yield from (f"only one of them has: {name}" for name in comparison.only_one)
    yield from conclusions(comparison)


def _compare_cell(a: CellResult, b: CellResult, ttft: float, tpot: float, level: float) -> CellComparison:
    goodput_a, goodput_b = ([run.goodput(ttft, tpot) for run in cell.runs] for cell in (a, b))
    return CellComparison(
        name=a.name,
        a=Over.repeats(goodput_a),
        b=Over.repeats(goodput_b),
        kept_a=a.kept(ttft, tpot),
        kept_b=b.kept(ttft, tpot),
        num_repeats=min(len(a.runs), len(b.runs)),
        verdict=_verdict(goodput_a, goodput_b, level),
    )


def _verdict(a: Sequence[float], b: Sequence[float], level: float) -> Verdict:
    if not any((*a, *b)):
        return Verdict.NEITHER
    if min(len(a), len(b)) < 2:
        return Verdict.UNTOLD
    if _chance(a, b) >= level:
        return Verdict.EVEN
    return Verdict.A if fmean(a) > fmean(b) else Verdict.B


def _chance(a: Sequence[float], b: Sequence[float]) -> float:
    """Of means as far apart as these if both were the same: Welch's t-test (Biometrika 1947), two-sided."""
    errors = [variance(values) / len(values) for values in (a, b)]
    if not any(errors):
        return float(fmean(a) == fmean(b))
    freedom = sum(errors) ** 2 / sum(
        error**2 / (len(values) - 1) for error, values in zip(errors, (a, b), strict=True)
    )
    return float(2 * stats.t.sf(abs(fmean(a) - fmean(b)) / math.sqrt(sum(errors)), freedom))


def _obstacles(a: Result, b: Result) -> Iterator[str]:
    """Why figures of the two say nothing of each other."""
    if a.config_digest != b.config_digest:
        keys = [key for key in a.config if a.config[key] != b.config.get(key)]
        yield f"the configurations differ ({', '.join(keys) or 'in what only one of them has'})"
    if a.machine != b.machine:
        yield f"the machines differ ({a.machine.text()}; {b.machine.text()})"
    if a.served.device != b.served.device:
        yield f"the devices differ ({a.served.device or 'unknown'}; {b.served.device or 'unknown'})"


def _differences(a: Result, b: Result) -> Iterator[str]:
    """What a comparison may be about."""
    ours, theirs = asdict(a.served), asdict(b.served)
    for name in ours:
        if name not in ("device", "chosen") and ours[name] != theirs[name]:
            yield f"{name}: {ours[name] or 'unknown'}; {theirs[name] or 'unknown'}"
    for name, version in a.versions.items():
        if version != b.versions.get(name):
            yield f"{name} of the client: {version}; {b.versions.get(name, 'unknown')}"
