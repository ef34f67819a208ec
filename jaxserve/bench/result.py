"""What a benchmark has found: a JSON file that says what was asked, of what, and how each request went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.bench.asks import Ask, digest_of
from jaxserve.bench.config import Limits
from jaxserve.bench.facts import Served
from jaxserve.bench.figures import DETAILS, summarise
from jaxserve.bench.traffic import Outcome, Run
from jaxserve.machine import Machine

FORMAT = 1
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """How one request went; times in seconds."""

    start: float
    ttft: float
    tpot: float | None
    """None for an answer of one token, or none."""
    latency: float
    output_tokens: int
    cached_tokens: int
    group: str
    greedy: bool
    attempts: int
    cancelled: bool
    route: str
    answer: str
    """A digest of the text."""
    error: str

    @classmethod
    def of(cls, ask: Ask, outcome: Outcome) -> RequestRecord:
        return cls(
            start=round(outcome.start, _DIGITS),
            ttft=round(outcome.ttft, _DIGITS),
            tpot=None if outcome.tpot is None or outcome.error else round(outcome.tpot, _DIGITS),
            latency=round(outcome.latency, _DIGITS),
            output_tokens=outcome.usage.output_tokens,
            cached_tokens=outcome.usage.cached_tokens,
            group=ask.group,
            greedy=ask.greedy,
            attempts=outcome.attempts,
            cancelled=outcome.cancelled,
            route=outcome.route,
            answer=digest_of(outcome.text),
            error=outcome.error,
        )

    @property
    def answered(self) -> bool:
        return not (self.error or self.cancelled)

    def keeps(self, ttft: float, tpot: float) -> bool:
        """Whether it was answered within both limits, in seconds."""
        # An answer of one token has no time for each further one, and keeps every limit of it.
        return self.answered and self.ttft <= ttft and (self.tpot or 0.0) <= tpot


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """One repeat of a cell."""

    repeat: int
    seconds: float
    figures: Mapping[str, float | None]
    """As `vllm bench serve` calls them, of those whose clients stayed; goodput at the configured limits."""
    requests: Sequence[RequestRecord]
    idle_seconds: float | None = None
    """From the last answer until the server had nothing open, where it says so."""

    @classmethod
    def of(
        cls, repeat: int, asks: Sequence[Ask], run: Run, limits: Limits, idle_seconds: float | None
    ) -> CellRun:
        stayed = Run([outcome for outcome in run.outcomes if not outcome.cancelled], run.seconds)
        figures = summarise(stayed, {"ttft": limits.ttft * 1e3, "tpot": limits.tpot * 1e3})
        return cls(
            repeat=repeat,
            seconds=round(run.seconds, _DIGITS),
            figures={name: value for name, value in figures.items() if name not in DETAILS},
            requests=[RequestRecord.of(*pair) for pair in zip(asks, run.outcomes, strict=True)],
            idle_seconds=idle_seconds,
        )

    def goodput(self, ttft: float, tpot: float) -> float:
        """Requests a second that kept both limits."""
        return sum(one.keeps(ttft, tpot) for one in self.requests) / self.seconds

    @property
    def meant_to_end(self) -> int:
        """Requests whose clients waited for their ends."""
        return sum(not one.cancelled for one in self.requests)


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A cell with every repeat that was run."""

    name: str
    kind: str
    settings: Mapping[str, Any]
    runs: Sequence[CellRun]

    def kept(self, ttft: float, tpot: float) -> float:
        """Of the requests whose clients waited for their ends, the share that kept both limits."""
        kept = sum(one.keeps(ttft, tpot) for run in self.runs for one in run.requests)
        return kept / max(1, sum(run.meant_to_end for run in self.runs))


@dataclass(frozen=True)
class Check:
    """One thing that answers were held to."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """All of it."""

    date: str
    config: Mapping[str, Any]
    config_digest: str
    plan_digest: str
    machine: Machine
    """Where the client ran, and with a server of its own that too."""
    load: float
    """How many programs wanted a core of it before the benchmark began, over a minute."""
    versions: Mapping[str, str]
    served: Served
    seconds: float
    cells: Sequence[CellResult]
    left_out: Sequence[str] = ()
    """Repeats of cells that were not measured, and why."""
    checks: Sequence[Check] = field(default_factory=tuple[Check, ...])

    @property
    def passed(self) -> bool:
        """Whether every check of quality did."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> str:
        """The result as a JSON object, a line for each request."""
        fields = asdict(self) | {"format": FORMAT, "passed": self.passed}
        cells = ",\n".join(_cell_json(cell) for cell in fields.pop("cells"))
        head = json.dumps(fields, indent=1, allow_nan=False).removesuffix("\n}")
        return f'{head},\n "cells": [\n{cells}\n ]\n}}\n'

    @classmethod
    def read(cls, path: Path) -> Result:
        """A result that was written. Raises ValueError, naming the file, for anything else."""
        try:
            return cls._of(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: not a result of `jaxserve bench run`: {error!r}") from error

    @classmethod
    def _of(cls, stored: dict[str, Any]) -> Result:
        if stored["format"] != FORMAT:
            raise ValueError(f"format {stored['format']!r}; this version reads {FORMAT}")
        values = {name: stored[name] for name in cls.__dataclass_fields__}
        return cls(
            **values
            | {
                "machine": Machine(**values["machine"]),
                "served": Served(**values["served"]),
                "checks": tuple(Check(**one) for one in values["checks"]),
                "cells": [_read_cell(one) for one in values["cells"]],
            }
        )


def _read_cell(stored: dict[str, Any]) -> CellResult:
    values: dict[str, Any] = stored | {"runs": [_read_run(run) for run in stored["runs"]]}
    return CellResult(**values)


def _read_run(stored: dict[str, Any]) -> CellRun:
    values: dict[str, Any] = stored | {"requests": [RequestRecord(**one) for one in stored["requests"]]}
    return CellRun(**values)


def _cell_json(cell: dict[str, Any]) -> str:
    runs = ",\n".join(_run_json(run) for run in cell.pop("runs"))
    return f'  {_opened(cell)}, "runs": [\n{runs}\n  ]}}'


def _run_json(run: dict[str, Any]) -> str:
    requests = ",\n".join(f"     {json.dumps(one, allow_nan=False)}" for one in run.pop("requests"))
    return f'   {_opened(run)}, "requests": [\n{requests}\n   ]}}'


def _opened(fields: dict[str, Any]) -> str:
    """A JSON object without its last brace."""
    return json.dumps(fields, allow_nan=False).removesuffix("}")
