"""The TPU compiler takes the kernels: of attention in every head size, format and page size, and products by
quantised matrices of every format, by few rows and by many."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPORARY_BYTES = 1 << 20
"""Queries and results in the kernels' order, of a few hundred rows; a copy of a pool is far more."""


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_every_case_compiles() -> None:
    lines = compiled("tests.compilers.kernels", "v6e")
    assert len(lines) > 20
    assert all(line["temporaries"] < TEMPORARY_BYTES for line in lines)


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_every_product_by_a_quantised_matrix_compiles() -> None:
    lines = compiled("tests.compilers.matmuls", "v5e", "v5p", "v6e")
    assert {line["chip"] for line in lines} == {"v5e", "v5p", "v6e"}
    # A stack of the smallest of the real matrices is 900 MiB.
    assert all(line["temporaries"] < 2 * TEMPORARY_BYTES for line in lines if line["rows"] <= 64)


def compiled(module: str, *chips: str) -> list[dict[str, Any]]:
    """The lines of a module that compiles, none of which reports an error."""
    command = [sys.executable, "-m", module, *chips]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line for line in lines if line["error"]] == []
    return lines
