"""What a simulation comes to: percentiles, goodput, refusals, reuse; as records, JSON and a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.planning.records import Records
from jaxserve.planning.simulator import Simulation

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The latencies up to which a served request counts as good."""

    ttft: float = math.inf
    """Seconds from arrival to the first token."""
    tpot: float = math.inf
    """Seconds for each token after the first, in the mean over an answer."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Percentiles of one figure, in seconds; NaN where nothing was measured."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        """Over the values that are not NaN."""
        measured = values[~np.isnan(values)]
        if not measured.size:
            return cls(p50=math.nan, p95=math.nan, p99=math.nan)
        p50, p95, p99 = np.percentile(measured, PERCENTILES).tolist()
        return cls(p50=p50, p95=p95, p99=p99)


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """The requests of one class or one tenant, or all of them."""

    num_requests: int
    num_completed: int
    rejected: Mapping[str, int]
    """Refused at the door, by reason."""
    cut_off: Mapping[str, int]
    """Let in and ended before their answer was complete, by how."""
    queue: Spread
    """From arrival to admission, of those admitted."""
    max_wait: float
    """The longest from arrival to admission or, without one, to the end; refusals at the door are at once."""
    ttft: Spread
    """Of completed requests, as is `tpot`."""
    tpot: Spread
    num_good: int
    """Completed within the target of their class."""
    goodput: float
    """Good requests for each second in which requests arrived."""

    @property
    def good_share(self) -> float:
        """Of the requests that came."""
        return self.num_good / self.num_requests


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One simulation."""

    trace: str
    seconds: float
    """In which requests arrived."""
    end: float
    """Until the last event."""
    overall: GroupSummary
    by_priority: Mapping[str, GroupSummary]
    by_tenant: Mapping[str, GroupSummary]
    output_tokens_per_second: float
    preemptions: int
    prompt_tokens: int
    """Of the requests that were served."""
    cached_tokens: int
    """Of these, found in the prefix cache: prefill saved."""
    saved_seconds: float
    """Of the device's time, by `cached_tokens`."""
    ideal_reuse: float
    """The share of all prompt tokens that a cache without bounds would have had."""
    computed_tokens: int
    busy_share: float
    """Of the time until the last event, how much the device had a step to do."""
    num_steps: int

    @property
    def reuse(self) -> float:
        """The share of the served prompts' tokens that came from the cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not a finite number becomes None."""
        plain: dict[str, Any] = finite(asdict(self))
        return plain


def summarise(simulation: Simulation, targets: Mapping[str, Target] | None = None) -> Summary:
    """The figures of a simulation.

    `targets`: by priority class; a class that is not named has none, and all that it completes is good.
    """
    records = simulation.records
    good = _good(records, targets or {})
    seconds = simulation.trace.seconds
    served = ~records.rejected

    def group(mask: np.ndarray) -> GroupSummary:
        return _group(records, mask, good, seconds)

    return Summary(
        trace=simulation.trace.name,
        seconds=seconds,
        end=simulation.end,
        overall=group(np.ones(len(good), np.bool_)),
        by_priority={str(name): group(records.priority == name) for name in np.unique(records.priority)},
        by_tenant={str(name): group(records.tenant == name) for name in np.unique(records.tenant)},
        output_tokens_per_second=float(records.output_tokens.sum()) / max(simulation.end, 1e-9),
        preemptions=int(records.preemptions.sum()),
        prompt_tokens=int(records.prompt_tokens[served].sum()),
        cached_tokens=int(records.cached_tokens.sum()),
        saved_seconds=simulation.saved_seconds,
        ideal_reuse=simulation.trace.ideal_reuse,
        computed_tokens=simulation.num_computed_tokens,
        busy_share=simulation.busy_seconds / max(simulation.end, 1e-9),
        num_steps=simulation.num_steps,
    )


def _good(records: Records, targets: Mapping[str, Target]) -> np.ndarray:
    """Which requests were completed within the target of their class; an answer of one token has no TPOT."""
    ttft_limit = np.array([targets.get(name, Target()).ttft for name in records.priority.tolist()])
    tpot_limit = np.array([targets.get(name, Target()).tpot for name in records.priority.tolist()])
    in_time = records.ttft <= ttft_limit
    return records.completed & in_time & ~(records.tpot > tpot_limit)


def _group(records: Records, mask: np.ndarray, good: np.ndarray, seconds: float) -> GroupSummary:
    completed = mask & records.completed
    cut_off = mask & ~records.completed & ~records.rejected
    num_good = int((good & mask).sum())
    return GroupSummary(
        num_requests=int(mask.sum()),
        num_completed=int(completed.sum()),
        rejected=dict(Counter(records.outcome[mask & records.rejected].tolist())),
        cut_off=dict(Counter(records.outcome[cut_off].tolist())),
        queue=Spread.of(records.queue_seconds[mask]),
        max_wait=float(records.wait_seconds[mask].max()),
        ttft=Spread.of(records.ttft[completed]),
        tpot=Spread.of(records.tpot[completed]),
        num_good=num_good,
        goodput=num_good / max(seconds, 1e-9),
    )


def finite(value: Any) -> Any:
    """Plain values with None for every number that is not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


_COLUMNS = (
    ("requests", "{:d}"),
    ("done", "{:d}"),
    ("refused", "{:d}"),
    ("cut off", "{:d}"),
    ("queue p50", "{:.2f}"),
    ("p95", "{:.2f}"),
    ("p99", "{:.2f}"),
    ("max wait", "{:.1f}"),
    ("TTFT p50", "{:.2f}"),
    ("p95", "{:.2f}"),
    ("p99", "{:.2f}"),
    ("TPOT ms p50", "{:.1f}"),
    ("p95", "{:.1f}"),
    ("p99", "{:.1f}"),
    ("good/s", "{:.2f}"),
    ("good %", "{:.1f}"),
)


def table(rows: Sequence[tuple[str, GroupSummary]]) -> str:
    """Groups side by side, a line each, seconds unless said otherwise."""
    lines = [["", *(name for name, _ in _COLUMNS)]]
    lines += [[label, *_cells(group)] for label, group in rows]
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def _cells(group: GroupSummary) -> list[str]:
    queue, ttft, tpot = group.queue, group.ttft, group.tpot
    values = (
        group.num_requests,
        group.num_completed,
        sum(group.rejected.values()),
        sum(group.cut_off.values()),
        *(queue.p50, queue.p95, queue.p99),
        group.max_wait,
        *(ttft.p50, ttft.p95, ttft.p99),
        *(1e3 * tpot.p50, 1e3 * tpot.p95, 1e3 * tpot.p99),
        group.goodput,
        100 * group.good_share,
    )
    return [
        "-" if isinstance(value, float) and math.isnan(value) else form.format(value)
        for value, (_, form) in zip(values, _COLUMNS, strict=True)
    ]
