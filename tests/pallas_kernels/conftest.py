"""What several kernels' tests share."""

from __future__ import annotations

import pytest

from jaxserve.weights import cache_home
from pallas_kernels import native


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """The kernels for this CPU, built or found; skips where that cannot be."""
    if failure := native.load(cache_home() / "native"):
        pytest.skip(failure)
