"""What to serve a model on: candidates of precision, mesh and drafting, each simulated, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jaxserve.planning.capacity import Capacity, Engine, Steps, find_capacity, serve_at_once
from jaxserve.planning.drafted import DraftedSteps
from jaxserve.planning.plan_records import Candidate, Demand, Memory, Row, Sizes
from jaxserve.planning.traces import Trace
from jaxserve.planning.virtual_engine import MEMORY_SHARE, virtual_limits

SECONDS_AN_HOUR = 3600.0
_ALIKE = 0.02
"""Part by which two modelled figures may differ and say nothing."""


def plan(
    candidates: Sequence[Candidate],
    demand: Demand,
    sizes: Sizes,
    on_run: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Each candidate's row, in their order. `on_run` is called after each simulation."""
    return [_plan_one(candidate, demand, sizes, on_run) for candidate in candidates]


def best_row(rows: Sequence[Row]) -> Row | None:
    """Of those that serve the demand the one with the fewest chips for a token, then the quickest."""
    serving = [row for row in rows if row.serves]
    return min(serving, key=lambda row: (row.chips / row.output_rate, row.tpot_p95), default=None)


def shortlist(candidates: Sequence[Candidate], demand: Demand, sizes: Sizes) -> list[Candidate]:
    """Of ways to use as many chips those that no other beats: in the room for sequences, the time to prefill
    a prompt, the time of a token alone, and tokens a second with as many at once as there are slots or room.
    None where the model fits none of them."""
    kept: list[tuple[Candidate, tuple[float, ...]]] = []
    for candidate in candidates:
        try:
            engine = make_engine(candidate, sizes)
        except ValueError:
            continue
        row = _with_step_times(_empty_row(candidate, demand, sizes), engine, demand.trace)
        times = row.prefill_seconds, row.decode_seconds, row.batch_decode_seconds / row.batch
        own = (1 / row.batch, *times)
        if not any(_as_good(other, own) for _, other in kept):
            kept = [(one, other) for one, other in kept if not _as_good(own, other)]
            kept.append((candidate, own))
    return [candidate for candidate, _ in kept]


def _as_good(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether it costs nowhere more than another, by more than such figures are good for."""
    return all(mine <= (1 + _ALIKE) * theirs for mine, theirs in zip(one, other, strict=True))


def memory_of(candidate: Candidate, sizes: Sizes, sequence_tokens: int) -> Memory:
    """Where the bytes of one of a candidate's chips go, and how many sequences of a length they hold."""
    cost = candidate.cost
    footprint, model = cost.footprint, cost.footprint.model
    weights = candidate.precision.stored_bytes(model, candidate.others, cost.mesh)
    sequence_bytes = 0.0
    for window in model.windows:
        longest = window + sizes.max_chunk + sizes.num_slots // cost.mesh.data if window else sequence_tokens
        num_pages = -(-min(sequence_tokens, longest) // cost.page_size)
        page_bytes = cost.stage.page_bytes(cost.kv_format, cost.page_size, window) / cost.kv_shards
        sequence_bytes += num_pages * page_bytes
    room = MEMORY_SHARE * cost.chip.memory_bytes - weights
    return Memory(
        chip_bytes=cost.chip.memory_bytes,
        weight_bytes=weights,
        kv_token_bytes=sum(footprint.kv_token_bytes(cost.kv_format, window) for window in model.windows),
        page_token_bytes=sum(
            footprint.page_bytes(cost.kv_format, cost.page_size, window) / cost.page_size
            for window in model.windows
        ),
        sequence_tokens=sequence_tokens,
        largest_batch=cost.mesh.data * max(int(room // sequence_bytes), 0),
    )


def make_engine(candidate: Candidate, sizes: Sizes) -> Engine:
    """The candidate as an engine to simulate. Raises ValueError, with the bytes, if it does not fit."""
    cost = candidate.cost
    limits = virtual_limits(
        cost,
        num_slots=sizes.num_slots,
        max_model_len=sizes.max_model_len,
        max_chunk=sizes.max_chunk,
        weight_bytes=candidate.precision.stored_bytes(cost.footprint.model, candidate.others, cost.mesh),
    )
    steps: Steps = cost
    if candidate.acceptance is not None:
        steps = DraftedSteps(
            cost,
            limits,
            acceptance=candidate.acceptance,
            max_drafts=candidate.max_drafts,
            host_seconds=sizes.host_seconds,
        )
    return Engine(steps=steps, limits=limits, host_seconds=sizes.host_seconds)


def _plan_one(candidate: Candidate, demand: Demand, sizes: Sizes, on_run: Callable[[], object]) -> Row:
    row = _empty_row(candidate, demand, sizes)
    try:
        engine = make_engine(candidate, sizes)
    except ValueError as error:
        return replace(row, reason=str(error))
    row = _with_step_times(row, engine, demand.trace)
    if demand.all_at_once:
        return _with_burst(row, serve_at_once(engine, demand.trace, demand.target, demand.attainment), demand)
    capacity = find_capacity(engine, demand.trace, demand.target, demand.attainment, on_run)
    return _with_capacity(row, engine, capacity, demand, on_run)


def _empty_row(candidate: Candidate, demand: Demand, sizes: Sizes) -> Row:
    lengths = [one.prompt_tokens + one.output_tokens for one in demand.trace.requests]
    return Row(
        precision=candidate.precision.name,
        mesh=candidate.cost.mesh.size,
        axes=candidate.cost.mesh.name,
        acceptance=candidate.acceptance,
        memory=memory_of(candidate, sizes, int(np.percentile(lengths, 95))),
        bound="memory",
    )


def _with_step_times(row: Row, engine: Engine, trace: Trace) -> Row:
    prompt = round(_mean_prompt(trace))
    context = min(prompt + round(_mean_output(trace) / 2), engine.limits.max_model_len)
    batch = max(min(engine.limits.num_slots, row.memory.largest_batch), 1)
    return replace(
        row,
        prefill_seconds=engine.first_token_seconds(prompt),
        decode_seconds=engine.decode_seconds(1, context),
        batch=batch,
        batch_decode_seconds=engine.decode_seconds(batch, context),
    )


def _with_burst(row: Row, capacity: Capacity, demand: Demand) -> Row:
    """All requests on one engine from the start."""
    outcome = capacity.saturated
    everybody = outcome.summary.overall
    return _priced(
        replace(
            row,
            bound=capacity.bound,
            goodput=everybody.num_good / max(outcome.simulation.end, 1e-9),
            saturated=outcome.rate,
            engines=1,
            serves=capacity.rate > 0,
            ttft_p95=everybody.ttft.p95,
            tpot_p95=everybody.tpot.p95,
            output_rate=outcome.summary.output_tokens_per_second,
        ),
        demand,
    )


def _with_capacity(
    row: Row, engine: Engine, capacity: Capacity, demand: Demand, on_run: Callable[[], object]
) -> Row:
    """As many engines as the demand needs, or as there are chips for, the requests spread evenly."""
    row = replace(
        row, bound=capacity.bound, goodput=capacity.rate, saturated=capacity.saturated.sustained_rate
    )
    if capacity.best is None:
        return row
    available = math.inf if demand.num_chips is None else demand.num_chips // row.mesh
    # What is at hand serves what it can, where nobody says how much that is to be.
    needed = math.ceil(demand.rate / capacity.rate) if demand.rate else min(available, 1)
    engines = int(min(needed, available))
    served = min(demand.rate or math.inf, engines * capacity.rate)
    outcome = capacity.best
    if served < engines * capacity.rate:
        own_rate = len(demand.trace) / max(demand.trace.seconds, 1e-9)
        outcome = engine.run(demand.trace.scaled(served / engines / own_rate), demand.target)
        on_run()
    everybody = outcome.summary.overall
    return _priced(
        replace(
            row,
            engines=engines,
            serves=needed <= available,
            ttft_p95=everybody.ttft.p95,
            tpot_p95=everybody.tpot.p95,
            output_rate=served * _mean_output(demand.trace),
        ),
        demand,
    )


def _priced(row: Row, demand: Demand) -> Row:
    if demand.price is None or not row.output_rate:
        return row
    millions_an_hour = row.output_rate * SECONDS_AN_HOUR / 1e6
    return replace(row, cost_per_million=demand.price * row.chips / millions_an_hour)


def _mean_prompt(trace: Trace) -> float:
    return sum(one.prompt_tokens for one in trace.requests) / len(trace)


def _mean_output(trace: Trace) -> float:
    return sum(one.output_tokens for one in trace.requests) / len(trace)
