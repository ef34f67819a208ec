"""The layouts of cache and weights hold on a TPU and on a GPU: their compilers find nothing to copy.

A whole step (forward, sampling, write of the new token) of a model with window, full and expert layers over
an int8 cache is compiled for each target, for decoding and for a prompt's chunk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compilers.targets import TARGETS

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPORARIES_SHARE = 0.02
"""Most that a step's temporaries may take, of the cache's bytes. One layer's pages are 5 % of them, the
scales 3 %."""


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("target", "attention"), [("v6e", "tpu"), ("h200", "gpu")])
def test_a_step_copies_neither_cache_nor_weights(target: str, attention: str) -> None:
    if reason := TARGETS[target].missing:
        pytest.skip(f"no compiler for {target}: {reason}")
    steps = measure(target)
    assert [step["rows"] for step in steps] == [64, 1024]
    for step in steps:
        assert step["attention"] == attention
        assert step["copies"] == []
        assert step["aliased"] >= step["cache"]
        assert step["temporaries"] < TEMPORARIES_SHARE * step["cache"]


def measure(target: str) -> list[dict[str, Any]]:
    """Compile in a process of its own: the compilers want their settings before jax is imported."""
    command = [sys.executable, "-m", "tests.compilers.measure", target, "--json"]
    process = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=580, check=False
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return [json.loads(line) for line in process.stdout.splitlines()]
