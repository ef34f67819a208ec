"""The product's policy against first come, first served: what it promises, on a minute of made-up traffic."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from jaxserve.plan import EngineLimits
from jaxserve.planning import (
    MODELS,
    CostModel,
    Footprint,
    Simulation,
    SimulationOptions,
    Summary,
    Target,
    Trace,
    TraceRequest,
    find_chip,
    simulate,
    summarise,
    virtual_limits,
)
from jaxserve.planning.meshes import ChipMesh
from jaxserve.planning.policies import contender, find_contender
from jaxserve.planning.virtual_engine import END_TOKEN
from jaxserve.scheduling.classes import DEFAULT_CLASSES, PriorityClass, SchedulerPolicy
from tests.fake_limits import make_limits

TARGETS = {one.name: Target(ttft=one.ttft_target, tpot=one.tpot_target) for one in DEFAULT_CLASSES}


@pytest.fixture(scope="module")
def machine() -> tuple[EngineLimits, CostModel]:
    """Takes about fifteen of the requests below a second."""
    cost = CostModel(Footprint.of(MODELS["llama-3.1-8b"]), find_chip("v5e"), mesh=ChipMesh(tensor=2))
    return virtual_limits(cost, num_slots=64, max_model_len=8192, max_chunk=512), cost


def traffic(rate: float, count: int) -> Trace:
    """Chat-like lengths, three classes, two tenants of which one sends four times as much.

    Every other prompt begins with one of three texts of 512 tokens.
    """
    random = np.random.default_rng(3)
    arrivals = np.cumsum(random.exponential(1 / rate, count))
    prompts = np.clip(random.lognormal(6.5, 0.8, count), 8, 6000).astype(int)
    outputs = np.clip(random.lognormal(4.8, 0.7, count), 2, 800).astype(int)

    def hashes(number: int, prompt: int) -> tuple[int, ...]:
        own = range(100 * number + 10, 100 * number + 10 + -(-prompt // 512))
        return (number % 3, *own[1:]) if number % 2 and prompt > 512 else tuple(own)

    requests = tuple(
        TraceRequest(
            arrival=at, prompt_tokens=prompt, output_tokens=output, prefix_hashes=hashes(number, prompt)
        )
        for number, (at, prompt, output) in enumerate(
            zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        )
    )
    return Trace("chat", requests).assigned(
        tenants={"heavy": 0.8, "light": 0.2}, priorities={"interactive": 0.3, "default": 0.5, "batch": 0.2}
    )


def compare(machine: tuple[EngineLimits, CostModel], trace: Trace) -> dict[str, Summary]:
    limits, cost = machine
    return {
        name: summarise(simulate(trace, limits, cost.step_seconds, find_contender(name)), TARGETS)
        for name in ("fcfs", "longest-prefix", "fair")
    }


@pytest.mark.parametrize(("rate", "count"), [(3.0, 60), (12.0, 200)])
def test_up_to_saturation_nobody_is_refused_and_nothing_is_lost(
    machine: tuple[EngineLimits, CostModel], rate: float, count: int
) -> None:
    found = compare(machine, traffic(rate, count))
    assert found["fair"].overall.num_completed == count
    assert found["fair"].overall.num_good >= found["fcfs"].overall.num_good
    assert found["fair"].overall.num_good >= found["longest-prefix"].overall.num_good
    assert found["fair"].reuse > 0.1
    assert found["fair"].saved_seconds > 0


def test_beyond_saturation_more_is_served_in_time(machine: tuple[EngineLimits, CostModel]) -> None:
    found = compare(machine, traffic(rate=25.0, count=500))
    ours = found["fair"]
    for plain in (found["fcfs"], found["longest-prefix"]):
        assert ours.overall.goodput > 1.25 * plain.overall.goodput
        assert ours.by_priority["interactive"].num_good > 2 * plain.by_priority["interactive"].num_good
        assert ours.by_priority["batch"].num_good == plain.by_priority["batch"].num_good, "it has no target"
        # The light tenant does not pay for the heavy one.
        assert ours.by_tenant["light"].good_share > plain.by_tenant["light"].good_share
        assert ours.by_tenant["light"].queue.p95 < plain.by_tenant["light"].queue.p95
    for name, group in ours.by_priority.items():
        longest = next(one.max_wait for one in DEFAULT_CLASSES if one.name == name)
        assert group.max_wait < longest, name


def crowded(max_wait: float) -> Simulation:
    """Four slots, twice as many urgent requests as they can serve, and now and then a humble one."""
    policy = SchedulerPolicy(
        classes=(
            PriorityClass(name="urgent", rank=0, share=1000.0, max_wait=1e4),
            PriorityClass(name="humble", rank=1, share=0.001, max_wait=max_wait),
        )
    )
    requests = [
        TraceRequest(arrival=number / 80, prompt_tokens=8, output_tokens=10, priority="urgent")
        for number in range(800)
    ]
    requests += [
        TraceRequest(arrival=float(number), prompt_tokens=8, output_tokens=10, priority="humble")
        for number in range(1, 6)
    ]
    trace = Trace("crowd", tuple(sorted(requests, key=lambda request: request.arrival)))
    limits = make_limits(num_slots=4, eos_token_ids=(END_TOKEN,), max_logprobs=1)
    options = SimulationOptions(max_tokens=32, host_seconds=0.0)
    return simulate(trace, limits, lambda *step: 0.01, contender(policy, gated=False), options)


def test_nobody_waits_longer_than_its_class_allows() -> None:
    """But for the time until the next slot is free: an answer takes 0.1 s, so that one of four ends soon."""
    records = crowded(max_wait=2.0).records
    humble = records.priority == "humble"
    assert records.completed.all()
    assert records.queue_seconds[humble].max() <= 2.0 + 0.1
    starved = crowded(max_wait=inf).records
    assert starved.queue_seconds[humble].max() > 10.0


def test_a_class_without_room_to_wait_is_told_at_once(machine: tuple[EngineLimits, CostModel]) -> None:
    classes = tuple(replace(one, max_waiting=10) for one in DEFAULT_CLASSES)
    limits, cost = machine
    gated = contender(SchedulerPolicy(classes=classes), gated=True)
    found = simulate(traffic(rate=25.0, count=400), limits, cost.step_seconds, gated)
    summary = summarise(found)
    assert summary.overall.rejected["queue_full"] > 50
    refused = found.records.rejected
    assert (found.records.end - found.records.arrival)[refused].max() < 1.0  # within the step that ran
    assert found.timeline.waiting.max() <= 3 * 10 + limits.num_slots


def test_who_is_turned_away_may_come_back(machine: tuple[EngineLimits, CostModel]) -> None:
    classes = tuple(replace(one, max_waiting=10) for one in DEFAULT_CLASSES)
    limits, cost = machine
    gated = contender(SchedulerPolicy(classes=classes), gated=True)
    trace = traffic(rate=25.0, count=400)
    once = simulate(trace, limits, cost.step_seconds, gated)
    again = simulate(trace, limits, cost.step_seconds, gated, SimulationOptions(retries=3))
    assert again.records.num_retries.max() <= 3
    assert again.records.num_retries.sum() > 0
    assert again.records.completed.sum() > once.records.completed.sum()
    assert (again.records.outcome != "open").all()


def test_what_is_worth_nothing_any_more_is_cut_off(machine: tuple[EngineLimits, CostModel]) -> None:
    limits, cost = machine
    options = SimulationOptions(deadline=5.0)
    plain = find_contender("fcfs")
    found = simulate(traffic(rate=40.0, count=300), limits, cost.step_seconds, plain, options)
    expired = found.records.outcome == "expired"
    assert expired.sum() > 50
    assert np.isnan(found.records.scheduled[expired]).any()  # before it cost any computation
    assert (found.records.end - found.records.arrival).max() < 5.5
