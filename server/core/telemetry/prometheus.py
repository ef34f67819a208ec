"""The metrics of all models of a server in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from server.core.service import Service
from server.core.telemetry.families import FAMILIES
from server.core.telemetry.family import Family, View

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
CALLS = "jaxserve:door_responses"
CALLS_HELP = "Calls answered, by door, call and status: also those that reached no model."
CALLS_LABELS = ("door", "call", "code")


class Measured(Protocol):
    """What there is to measure of a server."""

    @property
    def services(self) -> Sequence[Service]:
        """Those that are loaded."""
        ...

    @property
    def calls(self) -> Counter[tuple[str, str, str]]:
        """Calls answered, by door, call and code."""
        ...


class Metrics:
    """A registry of its own. Nothing is kept up to date: everything is read when somebody asks."""

    def __init__(self, server: Measured) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServerCollector(server))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format. Call it in the services' event loop."""
        return generate_latest(self._registry)


class _ServerCollector(Collector):
    def __init__(self, server: Measured) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        views = [
            View(service, service.load(), service.engine.snapshot()) for service in self._server.services
        ]
        for family in FAMILIES:
            yield _metric(family, views)
        calls = CounterMetricFamily(CALLS, CALLS_HELP, labels=CALLS_LABELS)
        for labels, count in self._server.calls.items():
            calls.add_metric(labels, count)
        yield calls


def _metric(family: Family, views: Sequence[View]) -> Metric:
    labels = ("model_name", *family.labels)
    if family.kind == "histogram":
        return _histogram(family, labels, views)
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = kind(family.name, family.help, labels=labels)
    for view in views:
        for values, value in family.read(view):
            assert isinstance(value, int | float), f"{family.name} is no histogram"
            metric.add_metric((view.service.identity.name, *values), value)
    return metric


def _histogram(family: Family, labels: tuple[str, ...], views: Sequence[View]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=labels)
    for view in views:
        for values, value in family.read(view):
            assert not isinstance(value, int | float), f"{family.name} is a histogram"
            metric.add_metric((view.service.identity.name, *values), value.cumulative(), value.total)
    return metric
