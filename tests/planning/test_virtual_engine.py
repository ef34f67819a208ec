"""The engine without a device: time, answers that end by their seed, and a pool sized by the chip."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from jaxserve.loop import HostLoop
from jaxserve.plan import EngineLimits, SamplingParams, SequencePlan, SlotLoad, StepPlan, StepShape
from jaxserve.planning import (
    MODELS,
    CostModel,
    Footprint,
    VirtualClock,
    VirtualEngine,
    find_chip,
    virtual_limits,
)
from jaxserve.planning.meshes import ChipMesh
from jaxserve.planning.prompts import ANSWER_TOKEN
from jaxserve.planning.virtual_engine import END_TOKEN, answer_seed
from tests.fake_limits import make_limits

PARAMS = SamplingParams(temperature=0.0, max_tokens=100)


def limits(**changes: int) -> EngineLimits:
    return make_limits(eos_token_ids=(END_TOKEN,), max_logprobs=1, **changes)  # type: ignore[arg-type]


def load(slot: int, num_prompt: int, output_tokens: int, num_computed: int = 0) -> SlotLoad:
    return SlotLoad(
        slot=slot,
        tokens=[5] * num_prompt,
        num_prompt_tokens=num_prompt,
        num_computed=num_computed,
        pages=((1, 2, 3),),
        params=PARAMS,
        seed=answer_seed(output_tokens),
        sample_index=0,
        eos_token_ids=(END_TOKEN,),
    )


def plan(*parts: SequencePlan) -> StepPlan:
    return StepPlan.of(parts, [], StepShape(16, 8, 16))


def test_the_device_works_while_the_host_does_not_wait() -> None:
    clock = VirtualClock()
    engine = VirtualEngine(limits(), lambda shape, starts, counts: 0.5, clock, host_seconds=0.1)
    engine.load_slot(load(0, 3, 9))
    first = engine.dispatch(plan(SequencePlan(0, 3)))
    assert clock.now == pytest.approx(0.1)
    second = engine.dispatch(plan(SequencePlan(0, 1)))
    assert clock.now == pytest.approx(0.2)
    engine.collect(first)
    assert clock.now == pytest.approx(0.6)
    engine.collect(second)
    assert clock.now == pytest.approx(1.1)  # the second began as the first ended
    clock.advance_to(1.0)
    assert clock() == pytest.approx(1.1)
    assert engine.busy_seconds == pytest.approx(1.0)
    assert engine.num_computed_tokens == 4


def test_the_timer_sees_contexts_and_rows() -> None:
    seen: list[tuple[StepShape, list[int], list[int]]] = []

    def timer(shape: StepShape, starts: np.ndarray, counts: np.ndarray) -> float:
        seen.append((shape, starts.tolist(), counts.tolist()))
        return 1.0

    engine = VirtualEngine(limits(), timer, VirtualClock())
    engine.load_slot(load(0, 7, 9))
    engine.load_slot(load(3, 9, 9, num_computed=4))
    for parts in ([SequencePlan(0, 4), SequencePlan(3, 5)], [SequencePlan(3, 1), SequencePlan(0, 3)]):
        engine.dispatch(plan(*parts))
    assert seen == [
        (StepShape(16, 8, 16), [0, 4], [4, 5]),
        (StepShape(16, 8, 16), [9, 4], [1, 3]),
    ]


def test_tokens_come_for_the_rows_that_have_logits() -> None:
    engine = VirtualEngine(limits(), lambda *step: 1.0, VirtualClock())
    engine.load_slot(load(0, 4, 1))
    engine.load_slot(load(1, 3, 5))
    result = engine.collect(engine.dispatch(plan(SequencePlan(0, 4, 4), SequencePlan(1, 3))))
    assert result.tokens.tolist() == [ANSWER_TOKEN] * 3 + [END_TOKEN, ANSWER_TOKEN]
    assert result.top_tokens.shape == (5, 1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [257, 9])
def test_answers_end_where_their_seed_says(overlap: bool, num_pages: int) -> None:
    """Also under a pool so small that requests are preempted, and their slots filled anew."""
    engine = VirtualEngine(limits(num_pages=(num_pages,)), lambda *step: 1e-3, VirtualClock())  # type: ignore[arg-type]
    loop = HostLoop(engine, overlap=overlap)
    lengths = [1, 2, 9, 17, 5, 12]
    for number, length in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=20, seed=answer_seed(length))
        loop.add(str(number), [7] * 9, params)
    outputs = [delta.output for delta in loop.run_until_idle() if delta.output is not None]
    assert {output.request_id: len(output.outputs[0].token_ids) for output in outputs} == {
        str(number): length for number, length in enumerate(lengths)
    }
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    loop.check_integrity()


def cost(model: str = "llama-3.1-8b", chip: str = "v5e", **options: object) -> CostModel:
    return CostModel(Footprint.of(MODELS[model]), find_chip(chip), **options)  # type: ignore[arg-type]


def test_the_pool_fills_what_the_weights_leave() -> None:
    found = virtual_limits(cost(mesh=ChipMesh(tensor=4)), max_model_len=131072)
    left = 4 * 16e9 * 0.9 - 2 * 8030261248
    assert found.num_pages == (int(left / (64 * 131072)),)
    assert found.decode_shapes[-1] == StepShape(256, 256, 256, decode=True)
    assert [shape.rows for shape in found.chunk_shapes] == [16, 64, 256, 1024]
    small = virtual_limits(cost("smollm2-135m"), num_slots=4)
    assert small.num_pages == (4 * 8192 // 64 + 2,)  # more could never be used


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"1 x v5e has 1.44e\+10 bytes a chip to use, of which the weights take"
    ):
        virtual_limits(cost())
    with pytest.raises(ValueError, match="does not hold a sequence of 131072 tokens"):
        virtual_limits(cost(mesh=ChipMesh(tensor=2)))
    with pytest.raises(ValueError, match="max_model_len 200000 is out of range: the model takes 2 to 131072"):
        virtual_limits(cost(), max_model_len=200000)


def test_planning_needs_no_device_library() -> None:
    code = "import sys, jaxserve.planning; sys.exit('jax' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
