"""Pages that leave the device and come back."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.page_moves import PAGES_PER_MOVE, compile_page_programs
from jaxserve.engine.state import make_state
from jaxserve.model.cache import page_layouts
from tests.engine.models import small_engine
from tests.oracle.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With layers of full attention and of a window: two cache groups."""
    return write_tiny_model("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module", params=["float32", "int8"])
def engine(model: Path, request: pytest.FixtureRequest) -> DeviceEngine:
    """With more pages than one call moves."""
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
