"""Several decode iterations in one step give what as many steps give, and stop where the answers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.engine import DeviceEngine
from jaxserve.loop import HostLoop
from jaxserve.plan import PageGrant, SamplingParams, SequencePlan, SlotLoad, StepPlan, StepResult
from tests.engine.models import serve, small_engine
from tests.oracle.tiny_models import write_tiny_model

PROMPT = tuple(range(3, 31))
"""28 tokens, so that answers of more than four begin a third page."""
PARAMS = (
    SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, max_tokens=50, repetition_penalty=1.2, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, max_tokens=50, ignore_eos=True, logprobs=2),
)
STEPS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> DeviceEngine:
    folder: Path = write_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))
    return small_engine(folder, max_iterations=4)


def start(engine: DeviceEngine, **changes: Sequence[Any]) -> None:
    """Prompts in slots 0 to 2, each with its first token; `changes` are fields of each slot's load."""
    for slot, params in enumerate(PARAMS):
        fields: dict[str, Any] = {"params": params} | {name: values[slot] for name, values in changes.items()}
        load = SlotLoad(
            slot=slot,
            tokens=PROMPT,
            num_prompt_tokens=len(PROMPT),
            num_computed=0,
            pages=((1 + 4 * slot, 2 + 4 * slot),),
            seed=slot,
            sample_index=0,
            **fields,
        )
        engine.load_slot(load)
        shape = engine.limits.fit(len(PROMPT), 1, 1, False)
        engine.collect(engine.dispatch(StepPlan.of([SequencePlan(slot, len(PROMPT))], (), shape)))


def decode(engine: DeviceEngine, num_iterations: int, grants: Sequence[PageGrant] = ()) -> StepResult:
    shape = engine.limits.fit(3, 3, 3, True)
    one = StepPlan.of([SequencePlan(slot, 1) for slot in range(3)], grants, shape)
    plan = StepPlan(one.slots, one.num_tokens, one.num_logit_rows, one.grants, shape, num_iterations)
    return engine.collect(engine.dispatch(plan))


GRANTS = [PageGrant(0, slot, 2, 3 + 4 * slot) for slot in range(3)]


@pytest.fixture(scope="module")
def expected(engine: DeviceEngine) -> list[StepResult]:
    start(engine)
    return [decode(engine, 1, GRANTS if number == 0 else ()) for number in range(STEPS)]


def assert_same(results: Sequence[StepResult], expected: Sequence[StepResult]) -> None:
    for name in ("tokens", "logprobs", "ranks", "top_tokens", "top_logprobs"):
        ours, theirs = (np.concatenate([getattr(one, name) for one in some]) for some in (results, expected))
        assert np.array_equal(ours, theirs), name


@pytest.mark.parametrize("cuts", [(4, 4), (3, 2, 3), (1, 4, 1, 2)])
def test_iterations_are_steps(
    engine: DeviceEngine, expected: list[StepResult], cuts: tuple[int, ...]
) -> None:
    before = engine.compiles_after_ready
    start(engine)
    results = [decode(engine, cut, GRANTS if number == 0 else ()) for number, cut in enumerate(cuts)]
    assert [len(result.tokens) for result in results] == [3 * cut for cut in cuts]
    assert_same(results, expected)
    assert engine.compiles_after_ready == before


def test_each_sequence_stops_at_its_end(engine: DeviceEngine, expected: list[StepResult]) -> None:
    tokens = np.stack([one.tokens for one in expected])
    stop = int(tokens[1, 0])
    assert stop not in tokens[:1, 0]
    start(
        engine,
        params=[SamplingParams(temperature=0, max_tokens=50, stop_token_ids=[stop], logprobs=2), *PARAMS[1:]],
        max_known=[None, len(PROMPT) + 4, None],
    )
    ours = decode(engine, 4, GRANTS).tokens.reshape(4, 3)
    assert ours[:, 0].tolist() == [*tokens[:2, 0], -1, -1]
    assert ours[:, 1].tolist() == [*tokens[:3, 1], -1]
    assert ours[:, 2].tolist() == tokens[:4, 2].tolist()


def test_an_end_of_text_ends_unless_it_is_ignored(engine: DeviceEngine, expected: list[StepResult]) -> None:
    first = int(expected[0].tokens[0])
    heeds = SamplingParams(temperature=0, max_tokens=50, logprobs=2)
    for params, num_tokens in ((heeds, 1), (PARAMS[0], 4)):
        start(engine, params=[params, *PARAMS[1:]], eos_token_ids=[(first,), (), ()])
        assert (decode(engine, 4, GRANTS).tokens.reshape(4, 3)[:, 0] >= 0).sum() == num_tokens


def test_a_sequence_at_its_end_writes_nowhere(engine: DeviceEngine, expected: list[StepResult]) -> None:
    """Its page table may name pages that are another's by now."""
    stale = ((1, 2, 7),)  # the third page is that of slot 1
    start(engine, max_known=[len(PROMPT) + 2, None, None])
    load = SlotLoad(
        slot=0,
        tokens=(*PROMPT, 9, 9, 9),
        num_prompt_tokens=len(PROMPT),
        num_computed=len(PROMPT) + 2,
        pages=stale,
        params=PARAMS[0],
        seed=0,
        sample_index=0,
        max_known=len(PROMPT) + 4,
    )
    engine.load_slot(load)
    results = [decode(engine, 4, GRANTS[1:]), decode(engine, 4)]
    tokens = np.concatenate([result.tokens for result in results]).reshape(8, 3)
    assert tokens[1:4, 0].tolist() == [-1, -1, -1]
    assert np.array_equal(tokens[:4, 1:], np.stack([one.tokens for one in expected])[:4, 1:])


def test_more_iterations_than_compiled_are_refused(engine: DeviceEngine) -> None:
    with pytest.raises(ValueError, match=r"5 iterations of .*; at most 4"):
        decode(engine, 5)
    shape = engine.limits.fit(9, 1, 1, False)
    plan = StepPlan.of([SequencePlan(0, 9)], (), shape)
    with pytest.raises(ValueError, match=r"2 iterations of .*, of a decode shape"):
        engine.dispatch(StepPlan(plan.slots, plan.num_tokens, plan.num_logit_rows, plan.grants, shape, 2))
    assert engine.limits.max_iterations == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_that_iterates_answers_as_one_that_does_not(engine: DeviceEngine, overlap: bool) -> None:
    rng = np.random.default_rng(4)
    requests = [
        (
            rng.integers(3, engine.limits.vocab_size, length).tolist(),
            replace(params, seed=length, max_tokens=17 + length, stop_token_ids=[5, 6, 7, 8, length]),
        )
        for length, params in zip((3, 20, 40, 9, 33), PARAMS * 2, strict=False)
    ]
    single = HostLoop(OneIteration(engine), overlap=False)
    expected = serve(single, requests)
    outputs = serve(HostLoop(engine, overlap=overlap), requests)
    for ours, theirs in zip(outputs, expected, strict=True):
        (one,), (other,) = ours.outputs, theirs.outputs
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (
            other.token_ids,
            other.finish_reason,
            other.stop_reason,
        )
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
    assert engine.compiles_after_ready == 0


class OneIteration:
    """The same engine, which says that it cannot iterate."""

    def __init__(self, engine: DeviceEngine) -> None:
        self._engine = engine
        self.limits = replace(engine.limits, max_iterations=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
