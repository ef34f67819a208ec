"""Results written by hand, for what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.bench.asks import Ask
from jaxserve.bench.cells import cells_of, digest_of_plan
from jaxserve.bench.config import BenchConfig
from jaxserve.bench.facts import Served
from jaxserve.bench.result import CellResult, CellRun, Check, Result
from jaxserve.bench.traffic import Outcome, Run, Usage
from jaxserve.machine import Machine

CONFIG = BenchConfig.from_mapping(
    {"requests": 4, "matrix": {"uncached": [8], "output": [5], "concurrency": [1, 2], "cache": ["cold"]}}
)
CELLS = tuple(cell.name for cell in cells_of(CONFIG))


def outcome(ask: Ask, ttft: float, tpot: float, text: str = "same") -> Outcome:
    """An answer in full with these times in seconds."""
    latency = ttft + (ask.max_tokens - 1) * tpot
    return Outcome(start=0.0, ttft=ttft, latency=latency, usage=Usage(8, ask.max_tokens), text=text)


def cell_run(name: str, repeat: int, seconds: float, ttft: float, tpot: float, text: str = "same") -> CellRun:
    """A repeat of so many seconds in which every answer took the same times."""
    (cell,) = (one for one in cells_of(CONFIG) if one.name == name)
    asks = cell.work(CONFIG, repeat).asks
    run = Run([outcome(ask, ttft, tpot, text) for ask in asks], seconds)
    return CellRun.of(repeat, asks, run, CONFIG.limits, idle_seconds=0.0)


def result(
    seconds: Sequence[Sequence[float]],
    *,
    ttft: float = 0.1,
    tpot: float = 0.01,
    text: str = "same",
    **fields: Any,
) -> Result:
    """A result of CONFIG. `seconds`: of each repeat, cell by cell."""
    found = [
        CellResult(
            name=cell.name,
            kind=cell.kind,
            settings=cell.settings,
            runs=[cell_run(cell.name, repeat, taken, ttft, tpot, text) for repeat, taken in enumerate(own)],
        )
        for cell, own in zip(cells_of(CONFIG), seconds, strict=True)
    ]
    usual: dict[str, Any] = {
        "date": "2026-01-01T00:00:00+00:00",
        "config": CONFIG.as_json,
        "config_digest": CONFIG.digest,
        "plan_digest": digest_of_plan(CONFIG),
        "machine": Machine(processor="abacus", cores=2, system="Linux x86_64"),
        "load": 0.5,
        "versions": {"jaxserve": "0"},
        "served": Served(model="small", precision="float32", kv_format="float32", device="cpu"),
        "seconds": 10.0,
        "cells": found,
        "checks": (Check("answered", True, "all <well>"),),
    }
    return Result(**usual | fields)
