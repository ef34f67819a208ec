"""A configuration as cells, and a cell as the requests of one repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.bench.asks import Ask, Draw, plan_digest
from jaxserve.bench.config import COLD, WARM, BenchConfig
from jaxserve.bench.scenarios import Fault, Scenario

MATRIX = "matrix"
"""The kind of a cell that is no scenario."""
PRIMER_TOKENS = 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """One repeat of a cell."""

    primers: Sequence[Ask]
    """Asked and answered before the clock runs."""
    asks: Sequence[Ask]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A kind of traffic that has figures of its own."""

    name: str
    kind: str
    settings: Mapping[str, Any]
    """The axes of the matrix, or the scenario's."""
    scenario: Scenario | None = None

    @property
    def concurrency(self) -> int | None:
        """Requests that the client keeps open at most; None for no limit."""
        return self.settings["concurrency"] if self.scenario is None else self.scenario.concurrency

    @property
    def fault(self) -> Fault | None:
        return None if self.scenario is None else self.scenario.fault

    @property
    def tenants(self) -> Sequence[str]:
        """Whose tokens the requests bring."""
        return () if self.scenario is None else self.scenario.tenants

    def work(self, config: BenchConfig, repeat: int) -> Work:
        """What one repeat asks: the same for the same configuration."""
        draw = Draw(config.seed, self.name, repeat, config.vocab_size)
        parameters = asdict(config.sampling[self.settings["sampling"]])
        if self.scenario is not None:
            return Work(primers=(), asks=self.scenario.asks(draw, parameters))
        return _matrix_work(self.settings, draw, parameters, config.requests)


def _matrix_work(
    axes: Mapping[str, Any], draw: Draw, parameters: Mapping[str, Any], num_requests: int
) -> Work:
    shared = draw.tokens(axes["prefix"])
    asks = [
        Ask(
            token_ids=(draw.tokens(axes["prefix"]) if axes["cache"] == COLD else shared)
            + draw.tokens(axes["uncached"]),
            max_tokens=axes["output"],
            sampling={**parameters, "seed": draw.whole()},
            shares=axes["cache"] == WARM,
        )
        for _ in range(num_requests)
    ]
    if axes["cache"] != WARM:
        return Work(primers=(), asks=asks)
    # A token more, so that the whole prefix is computed and kept.
    primer = Ask(token_ids=shared + draw.tokens(1), max_tokens=PRIMER_TOKENS, sampling={"temperature": 0.0})
    return Work(primers=(primer,), asks=asks)


def cells_of(config: BenchConfig) -> list[Cell]:
    """Every cell of the matrix, then every scenario."""
    matrix = config.matrix.cells() if config.matrix else ()
    cells = [Cell(name=_matrix_name(axes), kind=MATRIX, settings=axes) for axes in matrix]
    cells += [
        Cell(name=name, kind=one.kind, settings=asdict(one), scenario=one)
        for name, one in config.scenario.items()
    ]
    return cells


def schedule(config: BenchConfig, cells: Sequence[Cell]) -> list[tuple[int, Cell]]:
    """Every repeat of every cell: each round in an order of its own, so that what drifts meets all alike."""
    order = np.random.default_rng([config.seed, config.repeats])
    return [
        (repeat, cells[place])
        for repeat in range(config.repeats)
        for place in order.permutation(len(cells)).tolist()
    ]


def digest_of_plan(config: BenchConfig) -> str:
    """A name for every request of the whole benchmark, in its order."""
    return plan_digest(
        ask
        for repeat, cell in schedule(config, cells_of(config))
        for part in (cell.work(config, repeat),)
        for ask in (*part.primers, *part.asks)
    )


def _matrix_name(axes: Mapping[str, Any]) -> str:
    return (
        f"{axes['uncached']}+{axes['prefix']} -> {axes['output']}, {axes['sampling']}, "
        f"{axes['concurrency']} at once, {axes['cache']}"
    )
