"""A server's metrics page, or two of them some time apart: what was counted, how it was distributed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from jaxserve.planning.advice.missing import NotMeasured

_MODEL = "model_name"
_START = "process_start_time_seconds"
_ORDER = "jaxserve:steps_total"
"""A counter that moves whenever a server works: it tells the later of two pages."""


class MetricSample(NamedTuple):
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class MetricsPage:
    """One page as it was read."""

    name: str
    """Its address or file."""
    samples: Mapping[str, Sequence[MetricSample]]
    """By metric."""

    @property
    def models(self) -> list[str]:
        """The models that it speaks of."""
        found = (sample.labels.get(_MODEL) for samples in self.samples.values() for sample in samples)
        return list(dict.fromkeys(name for name in found if name is not None))

    def of_model(self, model: str) -> MetricsPage:
        """Without the samples of other models."""
        kept = {
            metric: [one for one in samples if one.labels.get(_MODEL, model) == model]
            for metric, samples in self.samples.items()
        }
        return MetricsPage(self.name, {metric: samples for metric, samples in kept.items() if samples})


def parse_page(name: str, text: str) -> MetricsPage:
    """A page in Prometheus' text format. Raises ValueError, naming it, for another text, and for one without
    a model's metrics; and if the parser is not installed."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ValueError(
            "a metrics page needs the package prometheus-client: pip install 'jaxserve[server]'"
        ) from None
    samples: dict[str, list[MetricSample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(MetricSample(sample.labels, sample.value))
    except ValueError as error:
        raise ValueError(f"{name} is no metrics page in Prometheus' text format: {error}") from None
    page = MetricsPage(name, samples)
    if not page.models:
        raise ValueError(f"{name} has no metric of a model: a server is up, perhaps, and nothing is loaded")
    return page


@dataclass(frozen=True)
class Histogram:
    """Values by bucket."""

    bounds: tuple[float, ...]
    """Upper bounds, ascending, the last one infinite."""
    counts: tuple[float, ...]
    """Values within each."""
    total: float
    """Their sum."""

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """NaN of nothing."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The value that so much is below. Values are taken to lie evenly within their bucket, as Prometheus
        does, and in the last one at its lower bound. NaN of nothing."""
        if not self.count:
            return math.nan
        rank, below = share * self.count, 0.0
        for index, (bound, count) in enumerate(zip(self.bounds, self.counts, strict=True)):
            if below + count >= rank and count:
                lower = self.bounds[index - 1] if index else 0.0
                return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / count
            below += count
        return self.bounds[-2]


class MetricsWindow:
    """What was counted between two pages of one model, or from the server's start to a single one.

    Every reader raises NotMeasured, naming the metric, for one that the page does not have.
    """

    def __init__(self, later: MetricsPage, earlier: MetricsPage | None = None) -> None:
        self._later = later
        self._earlier = earlier

    def gauge(self, metric: str) -> float:
        """The value on the later page; the sum where there are several labels."""
        return sum(sample.value for sample in _found(self._later, metric))

    def label(self, metric: str, label: str) -> str:
        """A label of an information metric."""
        return _found(self._later, metric)[0].labels[label]

    def labelled_gauge(self, metric: str, label: str) -> dict[str, float]:
        """Values on the later page by a label."""
        return {sample.labels[label]: sample.value for sample in _found(self._later, metric)}

    def counter(self, metric: str) -> float:
        """What was added, over all labels."""
        return sum(one.value for one in _found(self._later, metric)) - sum(
            one.value for one in self._before(metric)
        )

    def by_label(self, metric: str, label: str) -> dict[str, float]:
        """What was added, by a label."""
        added: dict[str, float] = {}
        for sign, samples in ((1.0, _found(self._later, metric)), (-1.0, self._before(metric))):
            for sample in samples:
                name = sample.labels[label]
                added[name] = added.get(name, 0.0) + sign * sample.value
        return added

    def histogram(self, metric: str, **labels: str) -> Histogram:
        """The values that were observed; those with such labels where there are some."""

        def matching(samples: Sequence[MetricSample]) -> list[MetricSample]:
            return [one for one in samples if all(one.labels.get(k) == v for k, v in labels.items())]

        cumulative: dict[float, float] = {}
        buckets = f"{metric}_bucket"
        for sign, samples in ((1.0, _found(self._later, buckets)), (-1.0, self._before(buckets))):
            for sample in matching(samples):
                bound = float(sample.labels["le"])
                cumulative[bound] = cumulative.get(bound, 0.0) + sign * sample.value
        bounds = tuple(sorted(cumulative))
        upto = [0.0, *(cumulative[bound] for bound in bounds)]
        counts = tuple(after - before for before, after in pairwise(upto))
        total = sum(one.value for one in matching(_found(self._later, f"{metric}_sum")))
        total -= sum(one.value for one in matching(self._before(f"{metric}_sum")))
        return Histogram(bounds, counts, total)

    def _before(self, metric: str) -> Sequence[MetricSample]:
        return () if self._earlier is None else self._earlier.samples.get(metric, ())


def _found(page: MetricsPage, metric: str) -> Sequence[MetricSample]:
    samples = page.samples.get(metric)
    if not samples:
        raise NotMeasured(f"the metric {metric}, which {page.name} does not have")
    return samples


def open_window(pages: Sequence[MetricsPage], model: str | None) -> MetricsWindow:
    """One page or two of the same process, in either order.

    Args:
        pages: as they were read.
        model: the one to look at; may be left out where there is a single one.

    Raises ValueError, naming the pages and what there is, for a model that is not on them, for more than two,
    and for two that are not of one process.
    """
    if len(pages) > 2:
        raise ValueError(
            f"{len(pages)} metrics pages; at most two can be compared, an earlier and a later one"
        )
    chosen = _model(pages[0], model)
    narrowed = [page.of_model(chosen) for page in pages]
    if len(narrowed) == 1:
        return MetricsWindow(narrowed[0])
    for page in narrowed:
        _model(page, chosen)
    starts = {sample.value for page in narrowed for sample in page.samples.get(_START, ())}
    if len(starts) > 1:
        raise ValueError(
            f"{pages[0].name} and {pages[1].name} are not of one process: it was started in between"
        )
    earlier, later = sorted(narrowed, key=lambda page: sum(one.value for one in page.samples.get(_ORDER, ())))
    return MetricsWindow(later, earlier)


def _model(page: MetricsPage, model: str | None) -> str:
    models = page.models
    if model is None and len(models) == 1:
        return models[0]
    if model is None:
        raise ValueError(f"{page.name} has several models: name one by --model, of {', '.join(models)}")
    if model not in models:
        raise ValueError(f"{page.name} has no model {model!r}; there is {', '.join(models) or 'none'}")
    return model
