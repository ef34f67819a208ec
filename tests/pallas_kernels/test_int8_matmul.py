"""Rows of int8 times an int8 matrix, by XLA and by the kernel for CPU, against numpy."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Target
from pallas_kernels.int8_matmul import int8_matmul, quantise_rows, rounded_int8_matmul

SHAPES = [
    (1, 16, 48),
    (1, 577, 50),
    (1, 1, 1),
    (2, 7, 3),
    (3, 100, 49),
    (4, 33, 50),
    (5, 64, 97),
    (17, 576, 96),
    (70, 40, 5),
    (9, 130, 70),
    (16, 64, 64),
    (41, 200, 131),
    (20, 130, 1030),
]
"""Rows, inputs, outputs: whole tiles, and rests of each."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("largest", [127, 2047], ids=["int8", "int16"])
@pytest.mark.parametrize("native", [False, True], ids=["reference", "cpu"])
def test_sums_are_exact_and_scaled(
    shape: tuple[int, int, int], native: bool, largest: int, request: pytest.FixtureRequest
) -> None:
    if native:
        request.getfixturevalue("native_kernels")
    num_rows, num_inputs, num_outputs = shape
    random = np.random.default_rng(num_rows)
    x = random.integers(-largest, largest + 1, (num_rows, num_inputs))
    x = x.astype(np.int8 if largest == 127 else np.int16)
    stack = random.integers(-128, 128, (3, num_outputs, num_inputs)).astype(np.int8)
    layer, w = 1, stack[1]
    x[0], w[0] = -largest, -128  # The largest products.
    multiply = jax.jit(functools.partial(int8_matmul, target=Target(native=native)))
    scale_x = random.random(num_rows, np.float32)
    scales = random.random((3, num_outputs), np.float32) * np.float32(1e-4)
    sums = x.astype(np.int32) @ w.astype(np.int32).T
    expected = sums.astype(np.float32) * (scale_x[:, None] * scales[layer])
    np.testing.assert_array_equal(multiply(x, stack, layer, scale_x, scales), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [8, 12])
def test_rows_are_rounded_to_the_same_numbers(
    shape: tuple[int, int, int], bits: int, native_kernels: None
) -> None:
    num_rows, num_inputs, num_outputs = shape
    random = np.random.default_rng(num_rows)
    x = random.normal(0, 10.0 ** random.integers(-6, 6, (num_rows, 1)), (num_rows, num_inputs))
    x = x.astype(np.float32)
    x[-1] = 0.0
    x[0, 0] = -3e4
    stack = random.integers(-127, 128, (2, num_outputs, num_inputs)).astype(np.int8)
    scales = random.random((2, num_outputs), np.float32)
    rows, scale = jax.jit(functools.partial(quantise_rows, bits=bits))(x)
    sums = np.asarray(rows, np.int32) @ stack[1].astype(np.int32).T
    expected = sums.astype(np.float32) * (np.asarray(scale)[:, None] * scales[1])
    for native in (False, True):
        multiply = jax.jit(
            functools.partial(rounded_int8_matmul, row_bits=bits, target=Target(native=native))
        )
        np.testing.assert_array_equal(multiply(x, stack, 1, scales), expected)


def test_shapes_that_disagree_are_named() -> None:
    rows, stack = jnp.zeros((2, 3), jnp.int8), jnp.zeros((6, 4, 3), jnp.int8)
    with pytest.raises(ValueError, match=r"rows \(2, 3\) times matrices \(6, 4, 5\)"):
        int8_matmul(rows, jnp.zeros((6, 4, 5), jnp.int8), 0, jnp.ones(2), jnp.ones((6, 4)))
    with pytest.raises(ValueError, match=r"scales \(6, 5\) of matrices \(6, 4, 3\)"):
        int8_matmul(rows, stack, 0, jnp.ones(2), jnp.ones((6, 5)))
    with pytest.raises(ValueError, match=r"scales \(3,\) of rows \(2, 3\)"):
        int8_matmul(rows, stack, 0, jnp.ones(3), jnp.ones((6, 4)))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the ways to multiply differ on x86 alone")
@pytest.mark.parametrize("without", ["-mno-amx-int8", "-mno-avx512f"])
def test_sums_are_exact_on_lesser_processors(without: str, native_kernels: None) -> None:
    chosen = "(exact_and_scaled and cpu) or rounded"
    command = [sys.executable, "-m", "pytest", __file__, "-k", chosen]
    done = subprocess.run(
        command, env=os.environ | {"CXXFLAGS": without}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert f"{4 * len(SHAPES)} passed" in done.stdout, done.stdout
