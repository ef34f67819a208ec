"""The GPU compiler takes the attention kernel in every format and page size, and spills nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
REGISTERS = 255
"""Of a thread; with 128 threads a block, two blocks have them on a multiprocessor."""
SINGLE_BYTES = 1 << 20
"""Queries and results in the kernel's order, parts of a context included; a pool has 16 MiB at least."""
MIXED_BYTES = 12 << 20


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="jax_cuda13_plugin is not installed")
def test_every_case_compiles_and_keeps_its_numbers_in_registers() -> None:
    command = [sys.executable, "-m", "tests.compilers.gpu_kernels"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) >= 28
    assert [line for line in lines if line["error"]] == []
    for line in lines:
        assert line["spilled"] == 0, line
        assert 0 < line["registers"] <= REGISTERS, line
        assert line["temporaries"] < (SINGLE_BYTES if line["single"] else MIXED_BYTES), line
