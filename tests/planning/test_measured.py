"""Step times put together from timed rungs, by hand; and what drafts make of a step."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.plan import StepShape
from jaxserve.planning import CostModel, Efficiency, Footprint, find_chip, find_model, virtual_limits
from jaxserve.planning.drafted import DraftedSteps
from jaxserve.planning.measured import MeasuredCost, fit_times
from jaxserve.planning.meshes import ChipMesh

DECODE = {rows: StepShape(rows, rows, rows, decode=True) for rows in (1, 4)}
CHUNK = {rows: StepShape(rows, 4, 4) for rows in (16, 64)}
MODEL = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    layers=(LayerKind(),) * 4 + (LayerKind(window=32),) * 4,
    max_position=1024,
)


def measured(shallow: dict[StepShape, float], deep: dict[StepShape, float]) -> MeasuredCost:
    times = fit_times(
        shallow,
        deep,
        (1, 3),
        decode_pair_seconds=1e-6,
        chunk_pair_seconds=1e-7,
        pairs=dict.fromkeys(deep, 10),
    )
    chip = find_chip("cpu-2-cores")
    formats = {"weight_format": "float32", "kv_format": "float32", "compute_format": "float32"}
    return MeasuredCost(Footprint.of(MODEL), chip, times, page_size=16, **formats)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_depth_and_attention_are_extrapolated() -> None:
    # A layer takes 1 ms, all else 2 ms; larger chunks do once what the smallest does: 64 rows take 2 + 3 x 4.
    shallow = {DECODE[1]: 3e-3, DECODE[4]: 5e-3, CHUNK[16]: 3e-3}
    deep = {DECODE[1]: 5e-3, DECODE[4]: 9e-3, CHUNK[16]: 5e-3, CHUNK[64]: 14e-3}
    cost = measured(shallow, deep)
    # Four layers see 100 keys and four no more than 32; the ten pairs of the timed step are in the layers.
    step = cost.cost(DECODE[1], ints(99), ints(1))
    assert step.head == pytest.approx(2e-3)
    assert step.matrices == pytest.approx(8 * (1e-3 - 10e-6))
    assert step.attention == pytest.approx(4 * 100e-6 + 4 * 32e-6)
    chunk = cost.cost(CHUNK[64], ints(0, 50), ints(63, 1))
    assert chunk.head == pytest.approx(2e-3)
    assert chunk.matrices == pytest.approx(8 * (4e-3 - 1e-6))
    inside = 32 * 33 / 2 + 31 * 32
    pairs = 1e-7 * (4 * 63 * 64 / 2 + 4 * inside) + 1e-6 * (4 * 51 + 4 * 32)
    assert chunk.attention == pytest.approx(pairs)


def test_shapes_between_and_beyond_the_timed_ones() -> None:
    deep = {DECODE[1]: 8e-3, DECODE[4]: 32e-3, CHUNK[16]: 16e-3, CHUNK[64]: 64e-3}
    cost = measured({}, deep)

    def layers(shape: StepShape) -> float:
        return cost.cost(shape, ints(0), ints(1)).matrices

    assert layers(StepShape(2, 2, 2, decode=True)) == pytest.approx(
        (2 * layers(DECODE[1]) + layers(DECODE[4])) / 3
    )
    assert layers(StepShape(8, 4, 4)) == layers(CHUNK[16])
    assert layers(StepShape(128, 4, 4)) == pytest.approx(2 * layers(CHUNK[64]))
    with pytest.raises(ValueError, match="no chunk step was timed"):
        measured({}, {DECODE[1]: 1.0}).cost(CHUNK[16], ints(0), ints(1))


def drafted(cost: CostModel, acceptance: float) -> DraftedSteps:
    limits = virtual_limits(cost, num_slots=16, max_model_len=2048)
    return DraftedSteps(cost, limits, acceptance=acceptance, max_drafts=3, host_seconds=0.0)


def test_drafts_that_are_free_come_at_their_expected_number() -> None:
    chip = find_chip("h100")
    ideal = Efficiency(compute=1.0, memory=1.0)
    cost = CostModel(Footprint.of(find_model("llama-3.1-8b")), chip, efficiency=ideal)
    step = StepShape(1, 1, 1, decode=True), ints(500), ints(1)
    plain, verify = cost.step_seconds(*step), cost.step_seconds(StepShape(4, 1, 4), ints(500), ints(4))
    # One token for sure, and up to three drafts, each likely by half of the one before it.
    assert drafted(cost, 0.5).step_seconds(*step) == pytest.approx(verify / (1 + 0.5 + 0.25 + 0.125))
    assert drafted(cost, 0.0).step_seconds(*step) == plain
    chunk = StepShape(256, 16, 16), ints(0), ints(200)
    assert drafted(cost, 0.5).step_seconds(*chunk) == cost.step_seconds(*chunk)


def test_more_acceptance_is_never_slower() -> None:
    cost = CostModel(Footprint.of(find_model("llama-3.1-8b")), find_chip("v5e"), mesh=ChipMesh(tensor=4))
    for batch in (1, 4, 16):
        step = StepShape(16, 16, 16, decode=True), ints(*[700] * batch), ints(*[1] * batch)
        seconds = [drafted(cost, rate).step_seconds(*step) for rate in (0.0, 0.2, 0.5, 0.8, 0.95)]
        assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(("acceptance", "max_drafts"), [(1.0, 3), (-0.1, 3), (0.5, 0)])
def test_drafting_that_cannot_be(acceptance: float, max_drafts: int) -> None:
    cost = CostModel(Footprint.of(MODEL), find_chip("v5e"))
    limits = virtual_limits(cost, num_slots=4)
    with pytest.raises(ValueError, match=r"an acceptance of|max_drafts 0 is below 1"):
        DraftedSteps(cost, limits, acceptance=acceptance, max_drafts=max_drafts, host_seconds=0.0)
