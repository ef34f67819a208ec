"""Benchmarks small enough for a test, against the HTTP door over the fake engine."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from jaxserve.bench.config import BenchConfig
from jaxserve.bench.result import CellResult, Result
from jaxserve.bench.run import Address, run_benchmark
from tests.server.http.running import HttpServer

SMALL: dict[str, Any] = {"uncached": 8, "output": 6}
"""Tokens of a request, of which the fake model takes 128."""


def bench(server: HttpServer, settings: dict[str, Any], **address: Any) -> Result:
    """Run a configuration once against a server in this process."""
    config = BenchConfig.from_mapping({"repeats": 1, "request_seconds": 20.0} | settings)
    return asyncio.run(run_benchmark(config, Address(**{"url": server.url, "pid": os.getpid()} | address)))


def scenario(server: HttpServer, kind: str, **settings: Any) -> CellResult:
    """One scenario's cell, after checks that every server must pass; most settings are their defaults."""
    tokens = settings.pop("tokens", {})
    result = bench(server, {"scenario": {kind: {"kind": kind} | SMALL | settings}}, tokens=tokens)
    assert result.passed, result.checks
    (cell,) = result.cells
    return cell
