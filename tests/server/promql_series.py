"""Samples as Prometheus holds them: scraped, selected by their labels, stale once they are gone."""

from __future__ import annotations

import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Points = list[tuple[float, float]]
Matrix = dict[Labels, Points]

LOOKBACK = 300.0
"""Seconds for which an instant selector takes a sample to hold."""
NAME = "__name__"


class Series:
    """The samples of some metrics since the start."""

    def __init__(self, names: Container[str] | None = None) -> None:
        """`names`: of the samples to keep, `up` among them or not; None keeps all."""
        self._names = names
        self._points: dict[Labels, list[tuple[float, float | None]]] = {}
        self._present: set[Labels] = set()
        self._by_name: dict[str, list[Labels]] = {}

    def scrape(self, text: str | None, at: float, **target: str) -> None:
        """Take in an exposition, or None where the target did not answer; `up` says which."""
        found: Vector = {_labels(NAME, "up", target): float(text is not None)}
        for line in (text or "").splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name != "#" and (self._names is None or name in self._names):
                series, _, value = line.rpartition(" ")
                found[_read_series(series) | frozenset(target.items())] = float(value)
        for labels in self._present - found.keys():
            self._points[labels].append((at, None))  # A marker: from here on it is stale.
        self._present = set(found)
        for labels, value in found.items():
            if labels not in self._points:
                self._points[labels] = []
                self._by_name.setdefault(dict(labels)[NAME], []).append(labels)
            self._points[labels].append((at, value))

    def instant(self, selector: Selector, at: float) -> Vector:
        found: Vector = {}
        for labels in self._selected(selector):
            known = self._since(labels, at, LOOKBACK)
            if known and (value := known[-1][1]) is not None:
                found[labels] = value
        return found

    def window(self, selector: Selector, at: float, length: float) -> Matrix:
        found: Matrix = {}
        for labels in self._selected(selector):
            known = [(t, value) for t, value in self._since(labels, at, length) if value is not None]
            if known:
                found[labels] = known
        return found

    def _selected(self, selector: Selector) -> Iterable[Labels]:
        return [labels for labels in self._by_name.get(selector.name, ()) if selector.matches(labels)]

    def _since(self, labels: Labels, at: float, length: float) -> list[tuple[float, float | None]]:
        points = self._points[labels]
        first, last = (bisect_right(points, time, key=lambda point: point[0]) for time in (at - length, at))
        return points[first:last]


@cache
def _read_series(text: str) -> Labels:
    """Name and labels, of which most are the same in every scrape."""
    (family,) = text_string_to_metric_families(f"{text} 0\n")
    (sample,) = family.samples
    return _labels(NAME, sample.name, sample.labels)


@dataclass(frozen=True)
class Selector:
    """A metric, and what its labels must be: label, test, value."""

    name: str
    tests: tuple[tuple[str, str, str], ...]

    def matches(self, labels: Labels) -> bool:
        known = dict(labels)
        return all(_MATCHES[test](known.get(label, ""), value) for label, test, value in self.tests)


def _labels(name: str, value: str, others: Mapping[str, str]) -> Labels:
    return frozenset({name: value, **others}.items())


def without_name(labels: Labels) -> Labels:
    return frozenset(item for item in labels if item[0] != NAME)


_MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "=~": lambda value, pattern: re.fullmatch(pattern, value) is not None,
    "!~": lambda value, pattern: re.fullmatch(pattern, value) is None,
}
