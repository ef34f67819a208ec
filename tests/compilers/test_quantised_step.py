"""A quantised model's steps read its stacks where they lie: none is copied, cut up or widened."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_MATRICES, LAYERS = 4, 5


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("target", ["v6e-1", "v6e-2"])
def test_the_kernels_take_whole_stacks(target: str) -> None:
    recipes = ["int8", "fp8", "int4"] if target == "v6e-1" else ["int4-128-zeros"]
    command = [sys.executable, "-m", "tests.compilers.quantised_step", target, *recipes]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    steps = [json.loads(line) for line in process.stdout.splitlines()]
    assert [step["rows"] for step in steps] == [8, 192] * len(recipes)
    for step in steps:
        assert step["chosen"] == "tpu"
        # Those that multiply, and attention's.
        assert step["kernels"] > NUM_MATRICES
        assert step["copies"] == []
        assert step["fetched"] == []


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="jax_cuda13_plugin is not installed")
def test_a_gpu_multiplies_few_rows_by_kernels_alone() -> None:
    recipes = ["int8", "fp8", "int4"]
    command = [sys.executable, "-m", "tests.compilers.quantised_step", "h200", *recipes]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    steps = [json.loads(line) for line in process.stdout.splitlines()]
    assert [(step["recipe"], step["rows"]) for step in steps] == [
        (recipe, rows) for recipe in recipes for rows in (8, 192)
    ]
    for step in steps:
        own = step["rows"] == 8 or step["recipe"] == "int4"
        # The head has eight bits, and as many rows as there are sequences.
        assert step["chosen"] == ("gpu" if own else "gpu, reference")
        # Layers lie apart: attention's, those that multiply, and the head's.
        assert step["kernels"] == LAYERS * (1 + NUM_MATRICES * own) + 1
        if own:
            assert step["copies"] == []
