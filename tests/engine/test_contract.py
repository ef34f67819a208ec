"""The answer contract on the real device half: schedules change when a token comes, never which one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.engine.engine import DeviceEngine
from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import (
    EngineLimits,
    IntArray,
    SamplingParams,
    SlotLoad,
    StepEngine,
    StepHandle,
    StepPlan,
    StepResult,
)
from jaxserve.scheduling import CacheIdentity
from tests.engine.models import serve, small_engine
from tests.oracle.tiny_models import write_tiny_model
from tests.policies import UNFORESEEN

NUM_REQUESTS = 32
IDENTITY = CacheIdentity(model="tiny", kv_format="float32")

Requests = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module", params=["llama_gqa_tied", "gemma3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DeviceEngine:
    folder = write_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return small_engine(folder, num_slots=8, decode_rows=(1, 8), chunk_rows=(16, 256), num_pages=140)


@pytest.fixture(scope="module")
def alone(engine: DeviceEngine) -> list[RequestOutput]:
    """Each request on its own: what every other schedule is compared with."""
    return serve(HostLoop(engine, overlap=False), mixed_requests(engine.limits.vocab_size), together=False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_chunk", [16, 256])
def test_a_batch_answers_as_each_request_alone(
    engine: DeviceEngine, alone: list[RequestOutput], max_chunk: int, overlap: bool
) -> None:
    loop = HostLoop(engine, overlap=overlap, max_chunk=max_chunk)
    assert_same(serve(loop, mixed_requests(engine.limits.vocab_size)), alone)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pool_too_small_answers_the_same_after_preemptions(
    engine: DeviceEngine, alone: list[RequestOutput], overlap: bool
) -> None:
    loop = HostLoop(SmallPool(engine, num_pages=11), overlap=overlap, max_chunk=64, policy=UNFORESEEN)
    outputs = serve(loop, mixed_requests(engine.limits.vocab_size))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_same(outputs, alone)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_warm_cache_answers_as_a_cold_one(
    engine: DeviceEngine, alone: list[RequestOutput], overlap: bool
) -> None:
    loop = HostLoop(engine, overlap=overlap, max_chunk=64, cache=IDENTITY)
    requests = mixed_requests(engine.limits.vocab_size)
    for warm in (False, True):
        outputs = serve(loop, requests)
        assert_same(outputs, alone)
        for (prompt, params), output in zip(requests, outputs, strict=True):
            if params.prompt_logprobs is not None:
                assert output.num_cached_tokens == 0, "each of its rows owes a log-probability"
            assert output.num_cached_tokens < len(prompt)
        assert not warm or sum(output.num_cached_tokens >= 16 for output in outputs) > 3


def test_a_warm_cache_in_a_pool_too_small_answers_the_same(
    engine: DeviceEngine, alone: list[RequestOutput]
) -> None:
    loop = HostLoop(SmallPool(engine, num_pages=13), max_chunk=64, cache=IDENTITY, policy=UNFORESEEN)
    requests = mixed_requests(engine.limits.vocab_size)
    outputs = serve(loop, requests) + serve(loop, requests)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert sum(output.num_cached_tokens for output in outputs) > 0
    assert_same(outputs, alone + alone)


def test_nothing_was_compiled_after_ready(engine: DeviceEngine, alone: list[RequestOutput]) -> None:
    assert len(alone) == NUM_REQUESTS
    assert engine.compiles_after_ready == 0


def test_the_requests_cover_what_they_should(engine: DeviceEngine, alone: list[RequestOutput]) -> None:
    reasons = {answer.finish_reason for output in alone for answer in output.outputs}
    assert {"stop", "length"} <= set(reasons)
    sampled = [output for output in alone if len(output.outputs) > 1]
    assert any(output.outputs[0].token_ids != output.outputs[1].token_ids for output in sampled)


def mixed_requests(vocab_size: int) -> Requests:
    """Requests that differ in everything that a request can say."""
    rng = np.random.default_rng(5)
    settings: list[dict[str, object]] = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 3},
        {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "prompt_logprobs": 2},
        {"temperature": 0.8, "seed": 1, "logprobs": 0},
        {"temperature": 1.0, "top_k": 20, "seed": 2},
        {"temperature": 1.2, "top_p": 0.8, "seed": 3, "n": 2},
        {"temperature": 0.9, "min_p": 0.05, "seed": 4, "stop_token_ids": list(range(0, vocab_size, 9))},
        {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "seed": 5},
        {"temperature": 1.0, "allowed_token_ids": list(range(10, 60)), "bad_token_ids": [11, 12], "seed": 6},
        {"temperature": 0.7, "logit_bias": {7: 4.0, 8: -9.0}, "seed": 7, "n": 3, "prompt_logprobs": 0},
        {
            "temperature": 1.0,
            "min_tokens": 12,
            "stop_token_ids": list(range(0, 64, 2)),
            "seed": 8,
            "logprobs": 2,
        },
    ]
    requests: Requests = []
    for number in range(NUM_REQUESTS):
        prompt = rng.integers(3, vocab_size, int(rng.choice([1, 3, 17, 40, 90]))).tolist()
        extra = settings[number % len(settings)]
        params = SamplingParams(max_tokens=int(rng.integers(4, 40)) + 12, ignore_eos=True, **extra)  # type: ignore[arg-type]
        requests.append((prompt, params))
    return requests


def assert_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for ours, theirs in zip(outputs, expected, strict=True):
        assert_close_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
        for answer, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert answer.token_ids == other.token_ids
            assert (answer.finish_reason, answer.stop_reason) == (other.finish_reason, other.stop_reason)
            assert_close_logprobs(answer.logprobs, other.logprobs)


def assert_close_logprobs(ours: Sequence[object] | None, theirs: Sequence[object] | None) -> None:
    assert (ours is None) == (theirs is None)
    for row, other in zip(ours or (), theirs or (), strict=True):
        assert (row is None) == (other is None)
        if row is not None:
            assert row.keys() == other.keys()  # type: ignore[attr-defined]
            for token, entry in row.items():  # type: ignore[attr-defined]
                assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-4)  # type: ignore[index]


class SmallPool:
    """An engine that says it has fewer pages than it has: no further compile for a pool under pressure."""

    def __init__(self, engine: StepEngine, num_pages: int) -> None:
        self._engine = engine
        groups = len(engine.limits.num_pages)
        self._limits = dataclasses.replace(engine.limits, num_pages=(num_pages,) * groups)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def load_slot(self, load: SlotLoad) -> None:
        self._engine.load_slot(load)

    def load_masks(
        self, slots: IntArray, masks: npt.NDArray[np.uint32], ahead: IntArray | None = None
    ) -> None:
        self._engine.load_masks(slots, masks, ahead)

    def dispatch(self, plan: StepPlan) -> StepHandle:
        return self._engine.dispatch(plan)

    def collect(self, handle: StepHandle) -> StepResult:
        return self._engine.collect(handle)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8", "float32 native", "int8 native"])
def invariant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DeviceEngine:
    """A shape-invariant engine that reports the log-probability of every token of the vocabulary."""
    folder: Path = write_tiny_model("gemma3_linear_rope", tmp_path_factory.mktemp("invariant"))
    precision, _, kernels = request.param.partition(" ")
    if kernels:
        request.getfixturevalue("native_kernels")
    return small_engine(
        folder,
        num_slots=8,
        decode_rows=(8,),
        # Products of integers are exact, so that there may be steps of one row.
        chunk_rows=(1, 4, 16, 64) if precision == "int8" else (4, 16, 64),
        max_logprobs=256,
        compute_format="bfloat16" if precision == "bfloat16" else "float32",
        recipe="int8" if precision == "int8" else None,
        deterministic=True,
        native=bool(kernels),
    )


def test_shape_invariant_numerics_are_bitwise_equal(invariant: DeviceEngine) -> None:
    rng = np.random.default_rng(9)
    vocab = invariant.limits.vocab_size
    params = SamplingParams(
        temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=vocab, prompt_logprobs=vocab
    )
    requests = [(rng.integers(3, vocab, length).tolist(), params) for length in (1, 7, 16, 33, 50, 90)]
    expected = serve(HostLoop(invariant, overlap=False, max_chunk=64), requests, together=False)
    # Scoring a prompt cuts it to the logit rows of a step: only the others fill the largest shape.
    reading = [(prompt, dataclasses.replace(params, prompt_logprobs=None)) for prompt, params in requests]
    warm = HostLoop(invariant, max_chunk=64, cache=IDENTITY)
    for loop, num_rounds in ((warm, 2), (HostLoop(invariant, max_chunk=16), 1)):
        for _ in range(num_rounds):
            outputs = serve(loop, reading)
            for ours, theirs in zip(outputs, expected, strict=True):
                assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs
        assert (outputs[-1].num_cached_tokens == 89) == (loop is warm)
    for max_chunk in (16, 5, 64):
        outputs = serve(HostLoop(invariant, max_chunk=max_chunk), requests)
        for ours, theirs in zip(outputs, expected, strict=True):
            assert ours.prompt_logprobs == theirs.prompt_logprobs
            assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
            assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs
