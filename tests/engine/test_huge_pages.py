"""Arrays in huge pages are the same arrays."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.engine import huge_pages
from jaxserve.engine.huge_pages import PAGE, HugePages

pytestmark = pytest.mark.skipif(not huge_pages.is_available(), reason="of use on Linux, for CPU, alone")
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_kernel = pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="this kernel gives no huge pages"
)


def memory(key: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.parametrize(
    "dtype", ["float32", "int8", "uint8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
)
def test_kept_arrays_are_the_same(dtype: str) -> None:
    pages, random = HugePages(), np.random.default_rng(0)
    for size in (7, 2**16 + 3, 2**18):
        array = random.integers(-8, 8, (size, 3)).astype(dtype)
        for given in (array, jnp.asarray(array)):
            kept = pages.keep(given)
            assert kept.dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(kept), array)


@needs_kernel
def test_memory_is_huge_pages_and_goes_with_the_arrays() -> None:
    gc.collect()
    before, resident = memory("AnonHugePages"), memory("Rss")
    kept = [HugePages().keep(np.full((2**20,), 1.5, np.float32)) for _ in range(4)]
    assert memory("AnonHugePages") - before >= 4 * PAGE
    assert float(jnp.sum(kept[3])) == 1.5 * 2**20
    kept.clear()
    gc.collect()
    assert memory("AnonHugePages") - before < 2 * PAGE
    assert memory("Rss") - resident < 8 * PAGE


@needs_kernel
def test_arrays_written_in_place_are_moved() -> None:
    array = jax.block_until_ready(jnp.full((8, 2**20), 2, jnp.float32))
    before = memory("AnonHugePages")
    huge_pages.advise({"pool": array, "small": jnp.zeros((3,))})
    assert memory("AnonHugePages") - before >= 8 * PAGE
    np.testing.assert_array_equal(np.asarray(array), 2.0)
