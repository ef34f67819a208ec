"""Runs a whole benchmark against one server."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import httpx

from jaxserve.bench.asks import Ask
from jaxserve.bench.cells import Cell, cells_of, digest_of_plan, schedule
from jaxserve.bench.config import BenchConfig
from jaxserve.bench.facts import Served, client_versions, num_open, read_served
from jaxserve.bench.http_stream import open_client
from jaxserve.bench.load import Target, ask_once, run_work
from jaxserve.bench.quality import IDLE_SECONDS, check_alone, check_answered, check_cold, check_idle
from jaxserve.bench.result import CellResult, CellRun, Check, Result
from jaxserve.bench.traffic import DoorError
from jaxserve.machine import Machine, machine_load

_IDLE_POLL = 0.05


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server is, and what is known of it beforehand."""

    url: str
    model: str | None = None
    """What requests ask for; by default the server's first."""
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of tenants; what no tenant asks comes with the first."""
    pid: int | None = None
    arguments: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict[str, str])


Progress = Callable[[str], object]
"""Told what is done next."""


async def run_benchmark(
    config: BenchConfig, address: Address, progress: Progress = lambda _: None, *, plan: str | None = None
) -> Result:
    """Measure everything that a configuration asks for, and check the answers.

    Args:
        config: what to ask.
        address: whom.
        progress: told what is done next.
        plan: the `digest_of_plan`, where it is known: a large plan's takes a while.

    Raises DoorError if the server cannot be asked at all; ValueError for a tenant without a token, for
    requests that are longer than the model takes, and for something that cannot be broken.
    """
    started = time.perf_counter()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    load = machine_load()
    cells = cells_of(config)
    check_tenants(cells, address.tokens)
    async with open_client(address.url, next(iter(address.tokens.values()), None)) as client:
        told = await read_served(client, address.model)
        served = replace(told, arguments=address.arguments, chosen=address.chosen)
        _check_lengths(config, cells, served)
        target = Target(
            client=client,
            model=served.model,
            namespace=_fresh_namespace(),
            tokens=address.tokens,
            request_seconds=config.request_seconds,
            server_pid=address.pid,
        )
        await _warm_up(target, config)
        runs, left_out = await _run_all(target, config, cells, progress)
        results = [
            CellResult(name=cell.name, kind=cell.kind, settings=cell.settings, runs=runs[cell.name])
            for cell in cells
        ]
        progress("checking answers")
        checks = await _check(replace(target, namespace=_fresh_namespace()), config, cells, results)
    return Result(
        date=date,
        config=config.as_json,
        config_digest=config.digest,
        plan_digest=digest_of_plan(config) if plan is None else plan,
        machine=Machine.here(),
        load=load,
        versions=client_versions(),
        served=served,
        seconds=round(time.perf_counter() - started, 3),
        cells=results,
        left_out=left_out,
        checks=checks,
    )


def check_tenants(cells: Sequence[Cell], tokens: Mapping[str, str]) -> None:
    """Raise ValueError for a tenant who has no token."""
    for cell in cells:
        for name in cell.tenants:
            if name not in tokens:
                raise ValueError(f"scenario {cell.name!r}: tenant {name!r} has no token: give --tokens")


def _check_lengths(config: BenchConfig, cells: Sequence[Cell], served: Served) -> None:
    """Raise ValueError where the first repeat of a cell has a request that the model cannot take."""
    longest = served.max_model_len
    if longest is None:
        return
    for cell in cells:
        for ask in cell.work(config, 0).asks:
            length = len(ask.token_ids) + ask.max_tokens
            if length > longest:
                limit = f"the model takes {longest} (max_model_len)"
                raise ValueError(f"{cell.name}: a request of {length} tokens with its answer; {limit}")


async def _warm_up(target: Target, config: BenchConfig) -> None:
    """Raises DoorError, with the server's words, if it does not answer."""
    ask = Ask(token_ids=[1, 2, 3, 4], max_tokens=2, sampling={"temperature": 0.0})
    for _ in range(config.warmups):
        outcome = await ask_once(target, ask, time.perf_counter())
        if outcome.error:
            raise DoorError(f"the first request failed: {outcome.error}")


async def _run_all(
    target: Target, config: BenchConfig, cells: Sequence[Cell], progress: Progress
) -> tuple[dict[str, list[CellRun]], list[str]]:
    """Every repeat of every cell by name, and those that were left out, with the reason."""
    runs: dict[str, list[CellRun]] = {cell.name: [] for cell in cells}
    left_out: list[str] = []
    limit = time.perf_counter() + config.max_seconds
    for repeat, cell in schedule(config, cells):
        label = f"{cell.name}, repeat {repeat + 1} of {config.repeats}"
        progress(label)
        try:
            async with asyncio.timeout(max(0.0, limit - time.perf_counter())):
                runs[cell.name].append(await _run_cell(target, config, cell, repeat))
        except TimeoutError:
            left_out.append(f"{label}: there was no time for it")
        except DoorError as error:  # What has been measured is worth as much as before.
            left_out.append(f"{label}: {error}")
    if left_out:  # What was broken off may still have slots and places in the queue.
        await _seconds_until_idle(target.client)
    return runs, left_out


async def _run_cell(target: Target, config: BenchConfig, cell: Cell, repeat: int) -> CellRun:
    work = cell.work(config, repeat)
    run = await run_work(target, work, cell.concurrency, cell.fault)
    idle = await _seconds_until_idle(target.client)
    return CellRun.of(repeat, work.asks, run, config.limits, idle)


async def _seconds_until_idle(client: httpx.AsyncClient) -> float | None:
    """IDLE_SECONDS where it takes longer; None where the server does not say what it has open."""
    started = time.perf_counter()
    while (count := await num_open(client)) != 0:
        if count is None:
            return None
        if time.perf_counter() - started > IDLE_SECONDS:
            return IDLE_SECONDS
        await asyncio.sleep(_IDLE_POLL)
    return round(time.perf_counter() - started, 3)


async def _check(
    target: Target, config: BenchConfig, cells: Sequence[Cell], results: Sequence[CellResult]
) -> tuple[Check, ...]:
    """What can be said of a matrix's answers; a scenario's may be refused by right."""
    checks = [check_idle(results)]
    if config.matrix is not None:
        checks += [check_answered(results, config.repeats), check_cold(results)]
    if config.matrix is not None and config.quality.alone:
        checks.append(await check_alone(target, config, cells, results))
    return tuple(checks)


def _fresh_namespace() -> str:
    """So that nothing of an earlier run is found in the server's cache."""
    return f"bench-{secrets.token_hex(8)}"
