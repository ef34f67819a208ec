"""Whether the answers are those that they should be: speed alone is worth nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.asks import Ask, digest_of
from jaxserve.bench.cells import MATRIX, Cell
from jaxserve.bench.config import BenchConfig, Quality
from jaxserve.bench.facts import Served
from jaxserve.bench.load import Target, ask_once
from jaxserve.bench.result import CellResult, Check, RequestRecord, Result

IDLE_SECONDS = 5.0
"""In which a server must be rid of what its clients have left."""


def check_idle(cells: Sequence[CellResult]) -> Check:
    """After each run the server had soon nothing open that nobody waits for."""
    waits = [run.idle_seconds for cell in cells for run in cell.runs if run.idle_seconds is not None]
    longest = max(waits, default=0.0)
    detail = f"after {len(waits)} runs nothing was open within {longest:.2f} s (limit {IDLE_SECONDS:g} s)"
    return Check("idle", longest < IDLE_SECONDS, detail)


def check_answered(cells: Sequence[CellResult], repeats: int) -> Check:
    """Every request of the matrix, in every repeat, got an answer of the length that it asked for."""
    short, failed, total, left_out = 0, 0, 0, 0
    for cell in _matrix(cells):
        left_out += repeats - len(cell.runs)
        for run in cell.runs:
            total += len(run.requests)
            failed += sum(not one.answered for one in run.requests)
            short += sum(one.answered and one.output_tokens < cell.settings["output"] for one in run.requests)
    detail = f"of {total} requests of the matrix {failed} failed and {short} answers were short"
    if left_out:
        detail += f"; repeats of its cells that were left out: {left_out}"
    return Check("answered", total > 0 and not (failed or short or left_out), detail)


def check_cold(cells: Sequence[CellResult]) -> Check:
    """No request of a cold cell found anything in the cache."""
    found = [
        one.cached_tokens
        for cell in _matrix(cells)
        if cell.settings["cache"] == "cold"
        for run in cell.runs
        for one in run.requests
        if one.cached_tokens
    ]
    return Check("cold", not found, f"{len(found)} requests of cold cells found {sum(found)} tokens computed")


async def check_alone(
    target: Target, config: BenchConfig, cells: Sequence[Cell], results: Sequence[CellResult]
) -> Check:
    """Requests that were answered under load are answered alike alone, with nothing cached.

    `target`: with a namespace that was not used yet.
    """
    chosen = _choose(config, cells, results)
    differ: list[str] = []
    errors: list[str] = []
    for name, ask, record in chosen:
        outcome = await ask_once(target, replace(ask, shares=False), time.perf_counter())
        if outcome.error:
            errors.append(outcome.error)
        elif digest_of(outcome.text) != record.answer:
            differ.append(name)
    alike = len(chosen) - len(differ) - len(errors)
    detail = f"{alike} of {len(chosen)} answers are the same alone{_named(differ)}"
    if errors:
        detail += f"; {len(errors)} were not answered: {errors[0]}"
    return Check("alone", _reaches(alike, len(chosen), config.quality.alone_identical), detail)


def check_reference(results: Sequence[CellResult], reference: Result, quality: Quality) -> Check:
    """Greedy answers are those of an earlier result. Raises ValueError as `answers_alike`."""
    alike, total = answers_alike(results, reference.cells)
    detail = f"{alike} of {total} greedy answers are those of the reference ({reference.served.model})"
    return Check("reference", _reaches(alike, total, quality.reference_identical), detail)


def answers_alike(one: Sequence[CellResult], other: Sequence[CellResult]) -> tuple[int, int]:
    """Of the greedy requests of the matrix that both have answered, how many alike, and how many in all."""
    known = {key: record.answer for key, record in _greedy_answers(other)}
    pairs = [(record.answer, known[key]) for key, record in _greedy_answers(one) if key in known]
    return sum(mine == theirs for mine, theirs in pairs), len(pairs)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a report of `jaxserve evaluate --json` says."""

    name: str
    """Of its file."""
    precision: str
    kv_format: str
    passed: bool
    num_floors: int

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """Raises ValueError, naming the file, for anything that is no such report; OSError for a file that
        cannot be read."""
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                name=path.name,
                precision=report["model"]["precision"],
                kv_format=report["model"]["kv_format"],
                passed=bool(report["passed"]),
                num_floors=len(report["verdicts"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: not a report of `jaxserve evaluate --json`: {error!r}") from error


def check_evaluation(evaluation: Evaluation, served: Served) -> Check:
    """It is about this precision, and every floor in it holds."""
    about = f"{evaluation.precision}, KV {evaluation.kv_format}"
    if (evaluation.precision, evaluation.kv_format) != (served.precision, served.kv_format):
        ours = f"{served.precision or 'unknown'}, KV {served.kv_format or 'unknown'}"
        return Check("evaluation", False, f"{evaluation.name} is about {about}; the server runs {ours}")
    held = "hold" if evaluation.passed else "do not all hold"
    passed = evaluation.passed and evaluation.num_floors > 0
    return Check("evaluation", passed, f"{evaluation.num_floors} floors of {about} {held}")


def _choose(
    config: BenchConfig, cells: Sequence[Cell], results: Sequence[CellResult]
) -> list[tuple[str, Ask, RequestRecord]]:
    """Answered requests of the matrix's first repeat, chosen by the seed among all cells alike."""
    planned = {cell.name: cell for cell in cells}
    by_cell: list[list[tuple[str, Ask, RequestRecord]]] = []
    for result in _matrix(results):
        for run in result.runs:
            if run.repeat == 0:
                asks = planned[result.name].work(config, 0).asks
                pairs = zip(asks, run.requests, strict=True)
                by_cell.append([(result.name, ask, record) for ask, record in pairs if record.answered])
    order = np.random.default_rng([config.seed, config.quality.alone])
    for candidates in by_cell:
        order.shuffle(candidates)  # type: ignore[arg-type]  # It shuffles any list in place.
    rounds = max(map(len, by_cell), default=0)
    mixed = [entries[place] for place in range(rounds) for entries in by_cell if place < len(entries)]
    return mixed[: config.quality.alone]


def _greedy_answers(cells: Sequence[CellResult]) -> Iterator[tuple[Any, RequestRecord]]:
    for cell in _matrix(cells):
        for run in cell.runs:
            for place, record in enumerate(run.requests):
                if record.answered and record.greedy:
                    yield (cell.name, run.repeat, place), record


def _matrix(cells: Sequence[CellResult]) -> Iterator[CellResult]:
    return (cell for cell in cells if cell.kind == MATRIX)


def _reaches(alike: int, total: int, share: float) -> bool:
    """Nothing that could be compared proves nothing."""
    return total > 0 and alike >= share * total


def _named(cells: Sequence[str]) -> str:
    return f"; not in: {'; '.join(dict.fromkeys(cells))}" if cells else ""
