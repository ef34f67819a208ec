"""What the device half says of itself: a compile while serving, and a cache of lower precision."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.engine import DeviceEngine
from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from tests.engine.models import serve, small_engine
from tests.oracle.cases import load_cases
from tests.oracle.tiny_models import write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=["int8", "float8_e4m3fn"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DeviceEngine:
    """A tiny model over a cache of eight bits."""
    folder: Path = write_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))
    return small_engine(folder, kv_format=request.param)


def test_a_cache_of_eight_bits_stays_near_float32(engine: DeviceEngine) -> None:
    # Three bits after the first one, where int8 has seven for the largest number of a head.
    bound = {"int8": 0.05, "float8_e4m3fn": 0.2}[engine.config.cache.kv_format]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
    cases = load_cases("qwen3").cases
    requests = [(case.prompt_ids.tolist(), params) for case in cases]
    alone = serve(HostLoop(engine), requests, together=False)
    together = serve(HostLoop(engine), requests)
    for case, output, other in zip(cases, alone, together, strict=True):
        assert output.prompt_logprobs is not None
        rows = zip(output.prompt_logprobs[1:], case.prompt_ids[1:].tolist(), strict=True)
        ours = np.array([row[token].logprob for row, token in rows if row is not None])
        if ours.size:  # Random weights, so that rounding is amplified more than a trained model would.
            assert 0 < np.abs(ours + case.nll).mean() < bound
        assert output.outputs[0].token_ids == other.outputs[0].token_ids


def test_a_compile_while_serving_is_counted_and_logged(
    engine: DeviceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    serve(HostLoop(engine), [([1, 2, 3], GREEDY)])
    before = engine.compiles_after_ready
    with caplog.at_level(logging.WARNING, logger="jaxserve"):
        serve(HostLoop(engine), [([1, 2, 3], GREEDY)])
        assert not caplog.records
        jax.jit(lambda x: x * 3 + 1)(jnp.ones((3,))).block_until_ready()
        serve(HostLoop(engine), [([1, 2, 3], GREEDY)])
    assert engine.compiles_after_ready > before
    assert len(caplog.records) == 1
    assert "compiled while serving" in caplog.text
