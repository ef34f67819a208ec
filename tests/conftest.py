"""Strict numerics for every test, and the inputs that several of them share."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.alone import turn

# The same examples in every run: a suite that fails now and then tells less than one that fails.
settings.register_profile("suite", derandomize=True, database=None, deadline=None)
settings.load_profile("suite")

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A shell that starts the suite in the background has it ignore Ctrl-C, and all that it starts in turn.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Of several processes none disturbs a test that measures. First, so that waiting is no test's time."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folder = item.config._tmp_path_factory.getbasetemp().parent  # All processes' own.
    with turn(folder, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """A file's tests stay together, for what they share is made once. Files are taken in their order, in
    which the last ones are short."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public models, prompts and vectors that lie beside a development checkout."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the data folder {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """The kernels for this CPU, built or found; skips where there is no compiler."""
    from jaxserve.weights import cache_home
    from pallas_kernels import native

    if failure := native.load(cache_home() / "native"):
        (pytest.fail if " failed: " in failure else pytest.skip)(failure)
