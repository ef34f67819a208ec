"""Pages that leave the device and come back, alone and under a loop whose pool is too small."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.page_moves import PAGES_PER_MOVE, compile_page_programs
from jaxserve.engine.state import make_state
from jaxserve.host_pages import page_swap
from jaxserve.loop import HostLoop
from jaxserve.model.cache import page_layouts
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import CacheIdentity
from tests.engine.models import serve, small_engine
from tests.oracle.tiny_models import write_tiny_model
from tests.policies import UNFORESEEN

CACHE = CacheIdentity(model="tiny", kv_format="any")
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With layers of full attention and of a window: two cache groups."""
    return write_tiny_model("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module", params=["float32", "int8"])
def engine(model: Path, request: pytest.FixtureRequest) -> DeviceEngine:
    """With a pool for little more than one long text."""
    return small_engine(model, num_pages=14, kv_format=request.param, moves_pages=True)


def test_what_is_written_is_read_back_and_the_other_pages_stay(engine: DeviceEngine) -> None:
    rng = np.random.default_rng(0)
    for group, size in enumerate(engine.page_bytes):
        # Bytes of 0 to 63 in every place are finite numbers in whatever format.
        data = rng.integers(0, 64, (13, size), np.uint8)
        engine.write_pages(group, range(1, 14), data)
        some = [9, 2, 5]
        replaced = rng.integers(0, 64, (3, size), np.uint8)
        before = engine.read_pages(group, range(1, 14))
        engine.write_pages(group, some, replaced)
        after = engine.read_pages(group, range(1, 14)).take()
        assert PAGES_PER_MOVE < 13, "more than one call"
        assert (before.take() == data).all(), "a read is of the time when it was started"
        assert before.ready
        data[np.array(some) - 1] = replaced
        assert (after == data).all()


def test_pages_and_data_that_do_not_fit_are_refused(engine: DeviceEngine) -> None:
    with pytest.raises(ValueError, match="page 14 is out of range: the group has 14 pages"):
        engine.read_pages(0, [3, 14])
    with pytest.raises(ValueError, match=r"data \(1, 3\) for 1 pages of \d+ bytes"):
        engine.write_pages(0, [1], np.zeros((1, 3), np.uint8))


def test_the_pool_is_not_copied(engine: DeviceEngine) -> None:
    cache = dataclasses.replace(engine.config.cache, num_pages=(600, 600))
    config = dataclasses.replace(engine.config, cache=cache)
    layouts = page_layouts(config, jax.default_backend())
    state = jax.eval_shape(functools.partial(make_state, config, layouts))
    for program, size in zip(compile_page_programs(config, state), engine.page_bytes, strict=True):
        for compiled in (program.read, program.write):
            assert isinstance(compiled, jax.stages.Compiled)
            analysis = compiled.memory_analysis()
            assert analysis is not None
            assert analysis.temp_size_in_bytes <= 2 * PAGES_PER_MOVE * size


def test_what_was_preempted_and_evicted_comes_back_with_the_same_tokens(engine: DeviceEngine) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 90, length).tolist() for length in (100, 90, 70, 60)]
    requests = [(prompt, PARAMS) for prompt in prompts]
    expected = answers(serve(HostLoop(engine), requests, together=False))
    swap = page_swap(engine, 200 * sum(engine.page_bytes))
    loop = HostLoop(engine, cache=CACHE, swap=swap, policy=UNFORESEEN)
    compiled = engine.compiles_after_ready
    assert answers(serve(loop, requests)) == expected
    assert loop.snapshot().num_preemptions
    again = serve(loop, requests, together=False)
    assert answers(again) == expected
    statistics = swap.statistics
    assert statistics.restored_pages
    assert not statistics.damaged_pages
    assert all(output.num_cached_tokens for output in again)
    assert engine.compiles_after_ready == compiled


def test_memory_for_no_page_is_refused(engine: DeviceEngine) -> None:
    with pytest.raises(ValueError, match=r"host_kv_memory 10 holds no page: .* takes \d+ bytes"):
        page_swap(engine, 10)


def answers(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]
