"""The TPU compiler takes the attention kernels in every head size, format and page size."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPORARY_BYTES = 1 << 20
"""Queries and results in the kernels' order, of a few hundred rows; a copy of a pool is far more."""


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_every_case_compiles() -> None:
    command = [sys.executable, "-m", "tests.compilers.kernels", "v6e"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) > 20
    assert [line for line in lines if line["error"]] == []
    assert all(line["temporaries"] < TEMPORARY_BYTES for line in lines)
