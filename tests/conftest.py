"""Strict numerics for every test, and the inputs that several of them share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run: a suite that fails now and then tells less than one that fails.
settings.register_profile("suite", derandomize=True, database=None, deadline=None)
settings.load_profile("suite")

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A shell that starts the suite in the background has it ignore Ctrl-C, and all that it starts in turn.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


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
