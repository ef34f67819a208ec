"""How many requests a second one engine serves within its limits, by simulation, and what stops it there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from jaxserve.plan import EngineLimits, StepShape
from jaxserve.planning.cost_model import Counts, Roofline
from jaxserve.planning.policies import contender
from jaxserve.planning.report import Summary, Target, summarise
from jaxserve.planning.simulator import Simulation, SimulationOptions, simulate
from jaxserve.planning.traces import Trace
from jaxserve.planning.workload import at_once
from jaxserve.scheduling.classes import SchedulerPolicy

Bound = Literal["memory", "bandwidth", "FLOPs", "TTFT", "TPOT", "queueing"]
"""What keeps an engine from serving more: room for weights or pages; reading weights and pages; arithmetic;
the limit on the time to the first token, or on the time per token, which even few requests do not keep; or
waiting for each other in bursts, while the device still has time."""

_LOWEST_SHARE = 1 / 32
"""Of the saturated rate, below which no load is tried."""
_NEAR_SATURATION = 0.9
_SCARCE_PAGES = 0.4
"""Share of a group's pages that may be free though requests wait for them: the scheduler keeps about a third
for what the running ones have yet to take."""
_HALVINGS = 3
_STEP_DOWN = 0.6


@dataclass
class DeviceUse:
    """Seconds of simulated steps by what each of them was bound by."""

    arithmetic: float = 0.0
    traffic: float = 0.0

    @property
    def bound(self) -> Bound:
        return "FLOPs" if self.arithmetic > self.traffic else "bandwidth"


class Steps(Protocol):
    """What steps take: a cost model, or one that reckons with drafts. Arguments as of `CostModel.cost`."""

    def step_seconds(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> float: ...

    def bottleneck(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> Roofline: ...


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine that is not there: how long its steps take, and what it holds."""

    steps: Steps
    limits: EngineLimits
    host_seconds: float
    """What the host takes for a step."""

    def run(self, trace: Trace, target: Target) -> Outcome:
        """Serve a trace, letting everybody wait."""
        use = DeviceUse()

        def timed(shape: StepShape, starts_S: Counts, counts_S: Counts) -> float:
            seconds = self.steps.step_seconds(shape, starts_S, counts_S)
            least = self.steps.bottleneck(shape, starts_S, counts_S)
            if least.arithmetic > least.traffic:
                use.arithmetic += seconds
            else:
                use.traffic += seconds
            return seconds

        simulation = simulate(
            trace,
            self.limits,
            timed,
            contender(SchedulerPolicy(), gated=False),
            SimulationOptions(host_seconds=self.host_seconds, max_tokens=1),
        )
        summary = summarise(simulation, {"default": target})
        return Outcome(simulation=simulation, summary=summary, use=use, target=target)

    def first_token_seconds(self, prompt_tokens: int) -> float:
        """Of a request that is alone: its chunks, one after the other."""
        largest = self.limits.chunk_shapes[-1].rows
        seconds = 0.0
        for start in range(0, prompt_tokens, largest):
            count = min(largest, prompt_tokens - start)
            shape = self.limits.fit(count, 1, 1, decode=False)
            seconds += (
                self.steps.step_seconds(shape, np.array([start]), np.array([count])) + self.host_seconds
            )
        return seconds

    def decode_seconds(self, batch: int, context: int) -> float:
        """Of a token when so many sequences of so many tokens decode together, spread over replicas."""
        own = -(-batch // self.limits.num_replicas)
        shape = self.limits.fit(own, own, own, decode=True)
        return self.steps.step_seconds(shape, np.full(batch, context - 1), np.ones(batch, np.int64))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One load on one engine."""

    simulation: Simulation
    summary: Summary
    use: DeviceUse
    target: Target

    @property
    def rate(self) -> float:
        """Requests served for each second until the last one's end."""
        return len(self.simulation.trace) / max(self.simulation.end, 1e-9)

    @property
    def sustained_rate(self) -> float:
        """The same while others waited, those under way counting half: as if it went on for ever.

        Where the queue was empty for most of the time there is no telling, and it is `rate`.
        """
        timeline, end = self.simulation.timeline, self.simulation.end
        queued = np.flatnonzero(timeline.waiting > 0)
        if not len(queued) or timeline.time[queued[-1]] < 0.5 * end:
            return self.rate
        until = float(timeline.time[queued[-1]])
        ended = int((self.simulation.records.end <= until).sum())
        return max((ended + float(timeline.running[queued[-1]]) / 2) / until, self.rate)

    @property
    def starved_of_pages(self) -> bool:
        """Whether requests waited while slots were free and pages were not."""
        timeline, limits = self.simulation.timeline, self.simulation.limits
        waiting = timeline.waiting > 0
        if not waiting.any():
            return False
        num_pages = limits.num_replicas * np.array(limits.num_pages)
        scarce = (timeline.free_pages < _SCARCE_PAGES * num_pages).any(axis=1)
        return bool((scarce & (timeline.running < limits.num_slots))[waiting].mean() > 0.5)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What one engine can do."""

    rate: float
    """Requests a second within the limits; 0 if not even few of them are."""
    saturated: Outcome
    """All requests at once."""
    best: Outcome | None
    """At that rate; None if it is 0."""
    bound: Bound
    """Why it is no higher."""


def find_capacity(
    engine: Engine,
    trace: Trace,
    target: Target,
    attainment: float,
    on_run: Callable[[], object] = lambda: None,
) -> Capacity:
    """The highest rate at which a share of the requests keeps the limits, within a tenth or so.

    Args:
        engine: what serves.
        trace: who comes, at any rate.
        target: the limits.
        attainment: the share of requests that must keep them.
        on_run: called after each simulation.
    """

    def run(load: Trace) -> Outcome:
        outcome = engine.run(load, target)
        on_run()
        return outcome

    saturated = run(at_once(trace))
    if math.isinf(target.ttft) and math.isinf(target.tpot):
        bound = name_bound(engine, saturated, None, saturated.sustained_rate)
        return Capacity(rate=saturated.sustained_rate, saturated=saturated, best=saturated, bound=bound)
    if (bound := _missed_alone(engine, trace, target, attainment)) is not None:
        return Capacity(rate=0.0, saturated=saturated, best=None, bound=bound)
    own_rate = len(trace) / max(trace.seconds, 1e-9)
    low, high = 0.0, saturated.sustained_rate
    best: Outcome | None = None
    beyond: Outcome | None = None
    load = high
    while load >= _LOWEST_SHARE * saturated.sustained_rate:
        outcome = run(trace.scaled(load / own_rate))
        if outcome.summary.overall.good_share >= attainment:
            low, best = load, outcome
            break
        high, beyond = load, outcome
        load *= _STEP_DOWN
    for _ in range(_HALVINGS if best and beyond else 0):
        load = math.sqrt(low * high)
        outcome = run(trace.scaled(load / own_rate))
        if outcome.summary.overall.good_share >= attainment:
            low, best = load, outcome
        else:
            high, beyond = load, outcome
    bound = name_bound(engine, saturated, beyond, low)
    return Capacity(rate=low, saturated=saturated, best=best, bound=bound)


def _missed_alone(engine: Engine, trace: Trace, target: Target, attainment: float) -> Bound | None:
    """The limit that not enough requests keep even where each is alone."""
    prompts = [one.prompt_tokens for one in trace.requests]
    if engine.first_token_seconds(int(np.quantile(prompts, attainment))) > target.ttft:
        return "TTFT"
    shortest = min(prompts) + 1
    return "TPOT" if engine.decode_seconds(1, shortest) > target.tpot else None


def serve_at_once(engine: Engine, trace: Trace, target: Target, attainment: float) -> Capacity:
    """The same of requests that are all there from the start, which is the only load tried."""
    outcome = engine.run(at_once(trace), target)
    if outcome.summary.overall.good_share >= attainment:
        bound = name_bound(engine, outcome, None, outcome.rate)
        return Capacity(rate=outcome.rate, saturated=outcome, best=outcome, bound=bound)
    return Capacity(rate=0.0, saturated=outcome, best=None, bound=name_bound(engine, outcome, outcome, 0.0))


def name_bound(engine: Engine, saturated: Outcome, beyond: Outcome | None, rate: float) -> Bound:
    """What to blame for the rate being no higher.

    Args:
        engine: what served.
        saturated: with all requests at once.
        beyond: the load that missed the limits, if one did.
        rate: requests a second within the limits.
    """
    if beyond is None or rate >= _NEAR_SATURATION * saturated.sustained_rate:
        return "memory" if saturated.starved_of_pages else saturated.use.bound
    records, target = beyond.simulation.records, beyond.target
    late, slow = records.ttft > target.ttft, records.tpot > target.tpot
    if slow.sum() >= late.sum():
        return "TPOT"
    alone = np.array([engine.first_token_seconds(int(n)) for n in records.prompt_tokens[late]])
    if np.median(alone / records.ttft[late]) >= 0.5:
        return "TTFT"
    return "memory" if beyond.starved_of_pages else "queueing"
