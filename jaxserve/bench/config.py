"""What a benchmark asks for: one TOML file, read strictly, the whole of which goes into the result."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from jaxserve.bench.asks import digest_of
from jaxserve.bench.scenarios import SCENARIOS, Scenario, Shape
from jaxserve.scheduling.settings import check_keys, check_ranges, number, read_table, whole

COLD, WARM = "cold", "warm"
_MAX_TOKENS = 2**20
_Record = TypeVar("_Record")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Parameters that requests are sampled with. Raises ValueError for one out of range."""

    temperature: float = number(0.0, 0.0, 2.0)
    top_p: float = number(1.0, 1e-6, 1.0)
    top_k: int = whole(0, 0)
    min_p: float = number(0.0, 0.0, 1.0)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a good answer keeps, in seconds; goodput counts those. Raises ValueError for one out of range."""

    ttft: float = number(1.0, 1e-6, 1e6)
    tpot: float = number(0.1, 1e-6, 1e6)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What answers are held to. Raises ValueError for a value out of range."""

    alone: int = whole(0, 0, 10_000)
    """So many requests of the matrix are asked again, alone and with nothing cached, and compared."""
    alone_identical: float = number(1.0, 0.0, 1.0)
    """The share of them that must be answered alike."""
    reference_identical: float = number(1.0, 0.0, 1.0)
    """The share of greedy answers that must be those of the reference result, where one is given."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A cell for each combination. Raises ValueError for an axis that is empty, repeats itself or is out of
    range."""

    uncached: Sequence[int] = (64,)
    """Tokens of a prompt that no other request has."""
    prefix: Sequence[int] = (0,)
    """Tokens before them: shared by all requests of a warm cell, and computed before; a cold cell has as
    many, of which each request's are its own."""
    output: Sequence[int] = (32,)
    sampling: Sequence[str] = ("greedy",)
    """Names of the tables under `sampling`."""
    concurrency: Sequence[int] = (1, 4)
    """Requests that are open at once, each followed by the next."""
    cache: Sequence[str] = (COLD, WARM)

    def __post_init__(self) -> None:
        for axis in ("uncached", "output", "concurrency"):
            _check_axis(axis, getattr(self, axis), low=1)
        _check_axis("prefix", self.prefix, low=0)
        for axis in ("sampling", "cache"):
            _check_names(axis, getattr(self, axis))
        for value in self.cache:
            if value not in (COLD, WARM):
                raise ValueError(f"cache {value!r} is not known; there are {COLD}, {WARM}")

    def cells(self) -> Iterator[dict[str, Any]]:
        """The axes of each cell; without a prefix there is nothing to be warm."""
        names = [axis.name for axis in fields(self)]
        for values in itertools.product(*(getattr(self, name) for name in names)):
            axes = dict(zip(names, values, strict=True))
            if axes["cache"] == COLD or axes["prefix"]:
                yield axes


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The whole of a configuration. Raises ValueError, naming the setting, for what contradicts itself."""

    name: str = "bench"
    seed: int = whole(0, 0, 2**32)
    repeats: int = whole(3, 1, 1000)
    """Every cell is run so often, each time with other requests, in turns with all others."""
    requests: int = whole(16, 1, 100_000)
    """Of each cell of the matrix in each repeat."""
    vocab_size: int = whole(256, 2)
    """Prompts are random token ids below it; every model has 256."""
    warmups: int = whole(2, 0, 100)
    """Requests before all others, which are not counted."""
    max_requests: int = whole(10_000, 1)
    """All repeats of everything together."""
    max_seconds: float = number(600.0, 1.0, 1e6)
    """After which the rest is left out, and the result says what; the checks of quality come after that."""
    request_seconds: float = number(60.0, 0.1, 1e5)
    """After which an answer is given up as failed."""
    limits: Limits = Limits()
    quality: Quality = Quality()
    sampling: Mapping[str, Sampling] = field(default_factory=lambda: {"greedy": Sampling()})
    matrix: Matrix | None = field(default_factory=Matrix)
    """None for scenarios alone."""
    scenario: Mapping[str, Scenario] = field(default_factory=dict[str, Scenario])

    def __post_init__(self) -> None:
        check_ranges(self)
        if not (isinstance(self.name, str) and self.name and self.name.isprintable()):
            raise ValueError(f"name {self.name!r} is not a line of printable characters")
        shapes: list[tuple[str, Shape]] = [(f"scenario.{name}", one) for name, one in self.scenario.items()]
        named = [(where, shape.sampling) for where, shape in shapes]
        named += [("matrix", name) for name in (self.matrix.sampling if self.matrix else ())]
        for where, sampling in named:
            if sampling not in self.sampling:
                raise ValueError(f"{where}.sampling {sampling!r} is no table under sampling: {_those(self)}")
        if self.num_requests > self.max_requests:
            raise ValueError(
                f"{self.num_requests} requests in all: the limit is {self.max_requests} (max_requests)"
            )
        if not self.num_requests:
            raise ValueError("there is nothing to ask: neither a matrix nor a scenario")

    @property
    def num_requests(self) -> int:
        """Of all repeats, without warm-ups and those that fill the cache."""
        in_matrix = self.requests * sum(1 for _ in self.matrix.cells()) if self.matrix else 0
        return self.repeats * (in_matrix + sum(one.num_requests for one in self.scenario.values()))

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """The whole of it, defaults too, as plain values."""
        return asdict(self) | {
            "matrix": None if self.matrix is None else asdict(self.matrix),
            "scenario": {name: {"kind": one.kind} | asdict(one) for name, one in self.scenario.items()},
        }

    @property
    def digest(self) -> str:
        """A name for what is asked and counted: two results with the same can be compared."""
        return digest_of(self.as_json)

    @classmethod
    def read(cls, path: Path) -> BenchConfig:
        """The configuration in a TOML file. Raises ValueError, naming the file, as `from_mapping`."""
        try:
            return cls.from_mapping(tomllib.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> BenchConfig:
        """The default configuration with what `settings` changes.

        Keys are the fields' names; `sampling` and `scenario` are tables by names of your own, a scenario with
        its `kind`. With scenarios and no `matrix` there is none. Raises ValueError that names the key, the
        value and the limit.
        """
        table = read_table(settings, "the configuration")
        check_keys(table, {one.name for one in fields(cls)}, "")
        values: dict[str, Any] = dict(table)
        if values.get("scenario") and "matrix" not in values:
            values["matrix"] = None
        for name, kind in (("limits", Limits), ("quality", Quality), ("matrix", Matrix)):
            if values.get(name) is not None:
                values[name] = _read_fields(kind, values[name], name)
        if "sampling" in values:
            values["sampling"] = {
                name: _read_fields(Sampling, one, f"sampling.{name}")
                for name, one in read_table(values["sampling"], "sampling").items()
            }
        if "scenario" in values:
            values["scenario"] = {
                name: _read_scenario(one, f"scenario.{name}")
                for name, one in read_table(values["scenario"], "scenario").items()
            }
        return cls(**values)


def _read_scenario(entry: Any, where: str) -> Scenario:
    values = dict(read_table(entry, where))
    kind = values.pop("kind", None)
    if kind not in SCENARIOS:
        raise ValueError(f"{where}.kind {kind!r} is not known; there are {', '.join(SCENARIOS)}")
    return _read_fields(SCENARIOS[kind], values, where)


def _read_fields(kind: type[_Record], entry: Any, where: str) -> _Record:
    values = read_table(entry, where)
    check_keys(values, {one.name for one in fields(kind)}, where)  # type: ignore[arg-type]
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return kind(**frozen)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error


def _check_axis(axis: str, values: Any, *, low: int) -> None:
    _check_list(axis, values)
    for value in values:
        if type(value) is not int or not low <= value <= _MAX_TOKENS:
            raise ValueError(f"{axis} {value!r} is not a whole number from {low} to {_MAX_TOKENS}")


def _check_names(axis: str, values: Any) -> None:
    _check_list(axis, values)
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{axis} {value!r} is not a name")


def _check_list(axis: str, values: Any) -> None:
    if not isinstance(values, tuple) or not values:
        raise ValueError(f"{axis} {values!r} is not a list of values")
    if len(set(values)) < len(values):
        raise ValueError(f"{axis} {list(values)} names a value twice")


def _those(config: BenchConfig) -> str:
    return ", ".join(config.sampling) or "there is none"
