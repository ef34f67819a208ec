"""What a metric is: a family of samples, and how its values are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from jaxserve.loop_stats import STEP_ROWS_BUCKETS, LoopSnapshot
from jaxserve.prefill_side import PrefillStatistics
from jaxserve.scheduling import ClassLoad
from jaxserve.scheduling.draft_tally import SpeculationStatistics
from jaxserve.scheduling.page_swap import SwapStatistics
from jaxserve.scheduling.prefix_tree import PrefixStatistics
from server.core.service import Load, Service
from server.core.statistics import ClassStatistics, Latencies, Statistics
from server.core.telemetry.histogram import cumulative

Buckets = list[tuple[str, float]]


class Distribution(Protocol):
    """A histogram to read."""

    @property
    def total(self) -> float: ...

    def cumulative(self) -> Buckets: ...


Value = float | Distribution
Sample = tuple[tuple[str, ...], Value]
"""Values of a family's own labels, and the value."""


@dataclass(frozen=True)
class View:
    """A service at the moment of reading."""

    service: Service
    load: Load
    snapshot: LoopSnapshot

    @property
    def counts(self) -> Statistics:
        return self.service.statistics

    @property
    def prefixes(self) -> PrefixStatistics:
        """All zero where no prefix is reused."""
        return self.snapshot.prefixes or PrefixStatistics()

    @property
    def swaps(self) -> SwapStatistics:
        """All zero where nothing is kept beyond the pool."""
        return self.snapshot.swaps or SwapStatistics()

    @property
    def prefills(self) -> PrefillStatistics:
        """All zero where nothing is computed apart."""
        return self.snapshot.prefills or PrefillStatistics()

    @property
    def speculation(self) -> SpeculationStatistics:
        """All zero where nothing is drafted."""
        return self.snapshot.speculation or SpeculationStatistics()


@dataclass(frozen=True)
class Family:
    """One metric."""

    name: str
    """Of a counter without the `_total` that the text format adds."""
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    read: Callable[[View], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    """Beside `model_name`."""


@dataclass(frozen=True)
class StepRows:
    """The loop's own histogram of rows in a step."""

    snapshot: LoopSnapshot

    @property
    def total(self) -> float:
        return float(self.snapshot.num_step_rows)

    def cumulative(self) -> Buckets:
        return cumulative(STEP_ROWS_BUCKETS, self.snapshot.step_rows)


def one(read: Callable[[View], Value]) -> Callable[[View], list[Sample]]:
    return lambda view: [((), read(view))]


def gauge(name: str, text: str, read: Callable[[View], float]) -> Family:
    return Family(name, "gauge", text, one(read))


def counter(name: str, text: str, read: Callable[[View], float]) -> Family:
    return Family(name, "counter", text, one(read))


def latency(name: str, text: str, read: Callable[[Latencies], Distribution]) -> Family:
    return Family(name, "histogram", text, one(lambda view: read(view.counts.latencies)))


def by_class(
    name: str,
    kind: Literal["gauge", "counter", "histogram"],
    text: str,
    read: Callable[[ClassStatistics], Value | None],
) -> Family:
    def samples(view: View) -> Iterator[Sample]:
        for label, one in view.counts.classes.items():
            value = read(one)
            if value is not None:
                yield (label,), value

    return Family(name, kind, text, samples, ("class",))


def class_gauge(name: str, text: str, read: Callable[[ClassLoad], float]) -> Family:
    def samples(view: View) -> Iterator[Sample]:
        for one in view.service.engine.class_loads():
            yield (one.name,), read(one)

    return Family(name, "gauge", text, samples, ("class",))
