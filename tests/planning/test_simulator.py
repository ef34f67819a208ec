"""Simulations against queueing theory, against themselves, and against what may never happen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.loop import HostLoop
from jaxserve.outputs import AnswerDelta
from jaxserve.plan import EngineLimits, SamplingParams
from jaxserve.planning import (
    MODELS,
    Contender,
    CostModel,
    Footprint,
    Simulation,
    SimulationOptions,
    Trace,
    TraceRequest,
    VirtualClock,
    VirtualEngine,
    find_chip,
    read_trace,
    simulate,
    virtual_limits,
)
from jaxserve.planning.meshes import ChipMesh
from jaxserve.planning.records import COMPLETED, OPEN
from jaxserve.planning.virtual_engine import END_TOKEN
from tests.fake_limits import make_limits

SERVICE = 0.01
"""Seconds that the single server takes for a request."""


def limits(**changes: object) -> EngineLimits:
    return make_limits(eos_token_ids=(END_TOKEN,), max_logprobs=1, **changes)  # type: ignore[arg-type]


def poisson(rate: float, count: int, output: int = 1) -> Trace:
    gaps = np.random.default_rng(1).exponential(1 / rate, count)
    arrivals = np.cumsum(gaps).tolist()
    return Trace(
        "poisson", tuple(TraceRequest(arrival=at, prompt_tokens=4, output_tokens=output) for at in arrivals)
    )


def single_server(trace: Trace) -> Simulation:
    """One slot, and each request one step of constant length: a queue with a deterministic server."""
    options = SimulationOptions(host_seconds=0.0, max_tokens=1)
    return simulate(trace, limits(num_slots=1), lambda *step: SERVICE, options=options)


def test_a_single_slot_waits_as_lindley_says() -> None:
    trace = poisson(80.0, 500)
    waits = single_server(trace).records.ttft - SERVICE
    expected = 0.0
    arrivals = [request.arrival for request in trace.requests]
    for number, wait in enumerate(waits):
        if number:
            expected = max(0.0, expected + SERVICE - (arrivals[number] - arrivals[number - 1]))
        assert wait == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("load", [0.5, 0.6])
def test_a_single_slot_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    records = single_server(poisson(load / SERVICE, 4000)).records
    theory = load * SERVICE / (2 * (1 - load))  # M/D/1
    assert np.mean(records.ttft - SERVICE) == pytest.approx(theory, rel=0.03)


def test_a_lone_request_takes_the_sum_of_its_steps() -> None:
    trace = Trace("one", (TraceRequest(arrival=3.0, prompt_tokens=40, output_tokens=5),))
    options = SimulationOptions(host_seconds=0.001)
    found = simulate(trace, limits(chunk_rows=(16,)), lambda *step: 0.1, options=options)
    # Three chunks of at most 16; the host plans while the device works, but for the first.
    assert found.records.ttft[0] == pytest.approx(0.301)
    assert found.records.tpot[0] == pytest.approx(0.1)
    assert 3.0 <= found.records.scheduled[0] <= 3.001 + 1e-9
    # The step that was under way when the answer ended is the last to come home.
    assert found.end == pytest.approx(3.801)
    assert found.records.output_tokens[0] == 5


@pytest.fixture(scope="module")
def llama() -> tuple[EngineLimits, CostModel]:
    cost = CostModel(Footprint.of(MODELS["llama-3.1-8b"]), find_chip("v5e"), mesh=ChipMesh(tensor=2))
    return virtual_limits(cost, num_slots=32, max_model_len=8192, max_chunk=512), cost


def rush() -> Trace:
    """More than the machine can take, of mixed lengths, some of which nothing could serve."""
    random = np.random.default_rng(7)
    requests = [
        TraceRequest(
            arrival=float(at),
            prompt_tokens=int(random.integers(1, 600) if number % 7 else random.integers(7000, 9000)),
            output_tokens=int(random.integers(1, 60)),
        )
        for number, at in enumerate(np.sort(random.uniform(0, 5, 150)))
    ]
    return Trace("rush", tuple(requests))


def test_every_request_ends_once(llama: tuple[EngineLimits, CostModel]) -> None:
    trace, ended = rush(), []
    found = simulate(trace, llama[0], llama[1].step_seconds, on_end=lambda: ended.append(1))
    records = found.records
    assert len(ended) == len(trace)
    assert OPEN not in records.outcome
    too_long = records.prompt_tokens >= 8192
    assert too_long.any()
    assert np.array_equal(records.rejected, too_long)
    assert (records.outcome[too_long] == "too long").all()
    assert (records.outcome[~too_long] == COMPLETED).all()
    asked = np.array([request.output_tokens for request in trace.requests])
    assert np.array_equal(records.output_tokens[~too_long], asked[~too_long])
    served = records.completed
    assert (records.arrival <= records.scheduled + 1e-12)[served].all()
    assert (records.scheduled < records.first_token)[served].all()
    assert (records.first_token <= records.end)[served].all()
    # Every known token but the last is computed once, or more often after a preemption.
    needed = int((records.prompt_tokens + records.output_tokens - 1)[served].sum())
    assert found.num_computed_tokens >= needed
    if not records.preemptions.any():
        assert found.num_computed_tokens <= needed + served.sum()
    assert 0 < found.busy_seconds <= found.end


def test_a_simulation_is_the_same_every_time(llama: tuple[EngineLimits, CostModel]) -> None:
    first, second = (simulate(rush(), llama[0], llama[1].step_seconds) for _ in range(2))
    for column in ("scheduled", "first_token", "end", "output_tokens", "preemptions", "cached_tokens"):
        assert np.array_equal(
            getattr(first.records, column), getattr(second.records, column), equal_nan=column != "preemptions"
        )
    assert (first.end, first.num_steps) == (second.end, second.num_steps)


def test_the_timeline_spans_the_simulation(llama: tuple[EngineLimits, CostModel]) -> None:
    found = simulate(rush(), llama[0], llama[1].step_seconds)
    time = found.timeline.time
    assert time[0] < 0.1
    assert time[-1] == found.end
    assert (np.diff(time) > 0).all()
    assert len(time) <= 1025
    assert found.timeline.waiting.max() > 32 >= found.timeline.running.max() > 0
    assert found.timeline.waiting[-1] == found.timeline.running[-1] == 0
    assert found.timeline.free_pages.min() >= 0


class StuckLoop(HostLoop):
    """Takes requests and never serves them."""

    def step(self) -> list[AnswerDelta]:
        return []


def test_a_loop_that_does_nothing_is_found_out() -> None:
    def make(engine: VirtualEngine, clock: VirtualClock) -> HostLoop:
        return StuckLoop(engine, clock=clock)

    with pytest.raises(RuntimeError, match=r"the loop holds 3 requests at 36\d\d.\d s and has done nothing"):
        simulate(poisson(10.0, 3), limits(), lambda *step: 1.0, Contender(make))


def test_clients_ask_for_more_than_they_get() -> None:
    """The scheduler sees what clients ask for at most, never how long an answer will be."""
    seen: list[SamplingParams] = []

    class WatchedLoop(HostLoop):
        def add(self, request_id: str, prompt_token_ids, params: SamplingParams, **rest) -> None:  # type: ignore[no-untyped-def]
            seen.append(params)
            super().add(request_id, prompt_token_ids, params, **rest)

    def make(engine: VirtualEngine, clock: VirtualClock) -> HostLoop:
        return WatchedLoop(engine, clock=clock)

    trace = poisson(10.0, 3, output=7)
    found = simulate(trace, limits(), lambda *step: 1.0, Contender(make), SimulationOptions(max_tokens=50))
    assert [params.max_tokens for params in seen] == [50] * 3
    assert found.records.output_tokens.tolist() == [7] * 3


def test_minutes_of_real_traffic(shared_data: Path, llama: tuple[EngineLimits, CostModel]) -> None:
    trace = read_trace(shared_data / "traces" / "azure2023" / "AzureLLMInferenceTrace_conv.csv")
    found = simulate(trace.window(0.0, 60.0), llama[0], llama[1].step_seconds)
    assert found.records.completed.all()
    assert found.records.ttft.max() < 60
