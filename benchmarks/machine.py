"""What machine a figure was taken on, and the limit that it has."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.machine import processor


def describe() -> str:
    """One line: processor, cores, load, versions."""
    load = os.getloadavg()[0]
    return (
        f"{processor()}, {os.cpu_count()} cores, load {load:.1f}; "
        f"Python {platform.python_version()}, jax {jax.__version__} on {jax.default_backend()}"
    )


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """The shortest of several runs, after one that is not counted."""
    run()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth(repeats: int = 10) -> float:
    """Bytes a second that a product of one row with a large float32 matrix reads: decode's roofline."""
    matrix = jnp.ones((16384, 4096), jnp.float32)
    row = jnp.ones((1, 4096), jnp.float32)
    multiply = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
    return matrix.nbytes / best_seconds(lambda: multiply(row, matrix).block_until_ready(), repeats)
