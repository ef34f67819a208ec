"""Just enough of PromQL to try alert rules: expressions over scrapes, and alerts that wait their `for`.

Semantics follow Prometheus': extrapolated rates with counter resets, one-to-one matching on all labels.
Whatever is not implemented raises, so a rule is never judged by a language that it is not in.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.server.promql_series import Labels, Points, Selector, Series, Vector, without_name

Value = float | Vector

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TOKEN = re.compile(
    r"""\s*(?:(?P<duration>\d+(?:ms|[smhd]))|(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"""
    r"""|(?P<string>"[^"\\]*")|(?P<symbol>==|!=|>=|<=|=~|!~|[-+*/(){}\[\],=<>]))"""
)


def seconds(text: str) -> float:
    """Of a duration such as 5m."""
    number, unit = re.fullmatch(r"(\d+)(ms|[smhd])", text).groups()  # type: ignore[union-attr]
    return int(number) * _UNITS[unit]


@dataclass
class Query:
    """A parsed expression: `evaluate` it at a time."""

    text: str
    names: set[str] = field(default_factory=set)
    """Of every metric that it reads."""

    def __post_init__(self) -> None:
        self._tokens = _tokenize(self.text)
        self._next = 0
        self._root = self._or()
        if self._next != len(self._tokens):
            raise ValueError(f"{self.text!r}: cannot read from {self._peek()!r} on")

    def evaluate(self, series: Series, at: float) -> Value:
        return self._root(series, at)

    # Each method below reads one level of the grammar and returns what computes it.

    def _or(self) -> _Node:
        return self._binary(("or",), self._and)

    def _and(self) -> _Node:
        return self._binary(("and", "unless"), self._comparison)

    def _comparison(self) -> _Node:
        return self._binary(tuple(_COMPARISONS), self._sum)

    def _sum(self) -> _Node:
        return self._binary(("+", "-"), self._product)

    def _product(self) -> _Node:
        return self._binary(("*", "/"), self._atom)

    def _binary(self, symbols: tuple[str, ...], below: Callable[[], _Node]) -> _Node:
        left = below()
        while self._peek() in symbols:
            left = _combine(self._take(), left, below())
        return left

    def _atom(self) -> _Node:
        token = self._take()
        if token == "(":
            inside = self._or()
            self._expect(")")
            return inside
        if re.fullmatch(r"\d+(\.\d+)?", token):
            return lambda series, at, value=float(token): value
        if token in _AGGREGATIONS:
            return self._aggregation(_AGGREGATIONS[token])
        if self._peek() == "(":
            return self._call(token)
        selector = self._selector(token)
        return lambda series, at: series.instant(selector, at)

    def _aggregation(self, reduce: Callable[[Iterable[float]], float]) -> _Node:
        kept: tuple[str, ...] = ()
        if self._peek() == "by":
            self._take()
            kept = tuple(self._list())
        self._expect("(")
        inside = self._or()
        self._expect(")")

        def node(series: Series, at: float) -> Value:
            groups: dict[Labels, list[float]] = {}
            for labels, value in _vector(inside(series, at)).items():
                groups.setdefault(frozenset(item for item in labels if item[0] in kept), []).append(value)
            return {labels: reduce(values) for labels, values in groups.items()}

        return node

    def _list(self) -> Iterable[str]:
        self._expect("(")
        names = [self._take()]
        while self._peek() == ",":
            self._take()
            names.append(self._take())
        self._expect(")")
        return names

    def _call(self, function: str) -> _Node:
        self._expect("(")
        if function in _OVER_TIME:
            selector, length = self._selector(self._take()), self._range()
            self._expect(")")
            compute = _OVER_TIME[function]

            def over_time(series: Series, at: float) -> Value:
                windows = series.window(selector, at, length).items()
                values = ((without_name(labels), compute(points, at, length)) for labels, points in windows)
                return {labels: value for labels, value in values if value is not None}

            return over_time
        if function == "histogram_quantile":
            quantile = float(self._take())
            self._expect(",")
            buckets = self._or()
            self._expect(")")
            return lambda series, at: _quantiles(quantile, _vector(buckets(series, at)))
        if function == "absent":
            inside = self._or()
            self._expect(")")
            return lambda series, at: {} if _vector(inside(series, at)) else {frozenset(): 1.0}
        raise ValueError(f"{self.text!r}: function {function!r} is not known here")

    def _range(self) -> float:
        self._expect("[")
        length = seconds(self._take())
        self._expect("]")
        return length

    def _selector(self, name: str) -> Selector:
        self.names.add(name)
        tests: list[tuple[str, str, str]] = []
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                tests.append((self._take(), self._take(), self._take().strip('"')))
                if self._peek() == ",":
                    self._take()
            self._take()
        return Selector(name, tuple(tests))

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        if not token:
            raise ValueError(f"{self.text!r} ends early")
        self._next += 1
        return token

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise ValueError(f"{self.text!r}: expected {token!r} before token {self._next}")


_Node = Callable[[Series, float], Value]


def _tokenize(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text!r}: cannot read {text[position:]!r}")
        tokens.append(match[0].strip())
        position = match.end()
    return tokens


def _vector(value: Value) -> Vector:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{value} is a number where a vector is needed")


def _combine(symbol: str, left: _Node, right: _Node) -> _Node:
    def node(series: Series, at: float) -> Value:
        a, b = left(series, at), right(series, at)
        if symbol in _SETS:
            return _SETS[symbol](_vector(a), _vector(b))
        if symbol in _COMPARISONS:
            return _compare(_COMPARISONS[symbol], _vector(a), b)
        return _calculate(_ARITHMETIC[symbol], a, b)

    return node


def _matched(vector: Vector) -> Vector:
    found = {without_name(labels): value for labels, value in vector.items()}
    if len(found) != len(vector):
        raise ValueError("several series on one side match one on the other")
    return found


def _compare(holds: Callable[[float, float], bool], left: Vector, right: Value) -> Vector:
    """A filter: what it lets through keeps its value."""
    if not isinstance(right, dict):
        return {labels: value for labels, value in left.items() if holds(value, right)}
    others = _matched(right)
    pairs = ((labels, value, others.get(without_name(labels))) for labels, value in left.items())
    return {labels: value for labels, value, other in pairs if other is not None and holds(value, other)}


def _calculate(apply: Callable[[float, float], float], left: Value, right: Value) -> Value:
    if isinstance(left, dict) and isinstance(right, dict):
        others, own = _matched(right), _matched(left)
        return {labels: apply(value, others[labels]) for labels, value in own.items() if labels in others}
    if isinstance(left, dict):
        assert isinstance(right, float)
        return {without_name(labels): apply(value, right) for labels, value in left.items()}
    if isinstance(right, dict):
        return {without_name(labels): apply(left, value) for labels, value in right.items()}
    return apply(left, right)


def _divide(left: float, right: float) -> float:
    if right:
        return left / right
    return math.copysign(math.inf, left) if left else math.nan


def _intersect(left: Vector, right: Vector) -> Vector:
    others = set(map(without_name, right))
    return {labels: value for labels, value in left.items() if without_name(labels) in others}


def _subtract(left: Vector, right: Vector) -> Vector:
    others = set(map(without_name, right))
    return {labels: value for labels, value in left.items() if without_name(labels) not in others}


def _increase(points: Points, at: float, length: float) -> float | None:
    """Of a counter, extrapolated to the window's ends as Prometheus does; it may have been reset."""
    if len(points) < 2:
        return None
    (first, low), (last, _) = points[0], points[-1]
    gain = sum(b - a if b >= a else b for (_, a), (_, b) in itertools.pairwise(points))
    between = (last - first) / (len(points) - 1)
    start, end = first - (at - length), at - last
    if start >= between * 1.1:
        start = between / 2
    if gain > 0 and low >= 0:
        start = min(start, (last - first) * low / gain)  # Below zero no counter can have been.
    if end >= between * 1.1:
        end = between / 2
    return gain * (last - first + start + end) / (last - first)


def _rate(points: Points, at: float, length: float) -> float | None:
    gain = _increase(points, at, length)
    return None if gain is None else gain / length


def _slope(points: Points, at: float, length: float) -> float | None:
    """By least squares, a second."""
    if len(points) < 2:
        return None
    times, values = zip(*points, strict=True)
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - middle) ** 2 for t in times)
    return sum((t - middle) * (value - mean) for t, value in points) / spread


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        groups.setdefault(frozenset(item for item in labels if item[0] != "le"), []).append((bound, count))
    return {labels: _quantile(quantile, sorted(group)) for labels, group in groups.items()}


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float:
    """Linear within a bucket."""
    total = buckets[-1][1]
    if not total:
        return math.nan
    wanted = quantile * total
    index = next(index for index, (_, count) in enumerate(buckets) if count >= wanted)
    if index == len(buckets) - 1:
        return buckets[-2][0]
    low, before = buckets[index - 1] if index else (0.0, 0.0)
    high, count = buckets[index]
    return low + (high - low) * (wanted - before) / (count - before)


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide}
_SETS: dict[str, Callable[[Vector, Vector], Vector]] = {
    "and": _intersect,
    "unless": _subtract,
    "or": lambda left, right: left | _subtract(right, left),
}
_AGGREGATIONS: dict[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}
_OVER_TIME: dict[str, Callable[[Points, float, float], float | None]] = {
    "rate": _rate,
    "increase": _increase,
    "deriv": _slope,
    "min_over_time": lambda points, at, length: min(value for _, value in points),
    "max_over_time": lambda points, at, length: max(value for _, value in points),
}


class Alert:
    """A rule, as Prometheus' file states it, and since when it holds for which labels."""

    def __init__(self, rule: Mapping[str, Any]) -> None:
        self.name: str = rule["alert"]
        self.query = Query(rule["expr"])
        self.annotations: Mapping[str, str] = rule["annotations"]
        self._delay = seconds(rule.get("for", "0s"))
        self._since: dict[Labels, float] = {}

    def firing(self, series: Series, at: float) -> list[Labels]:
        """Evaluate it now; the label sets for which it has held long enough."""
        holding = map(without_name, _vector(self.query.evaluate(series, at)))
        self._since = {labels: self._since.get(labels, at) for labels in holding}
        return [labels for labels, since in self._since.items() if at - since >= self._delay]
