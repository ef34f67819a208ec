"""The GPU compiler takes the kernels in every format, page size and number of rows, and spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxserve.engine.kernel_resources import KernelResources, kernel_table, kernels_recorded

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_BYTES = 227 << 10
"""Of a thread block, at the most."""
SINGLE_BYTES = 2 << 20
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
    attention = [line for line in lines if "single" in line]
    assert len(attention) >= 28
    assert len(lines) >= len(attention) + 18
    assert [line for line in lines if line["error"]] == []
    for line in lines:
        (kernel,) = line["kernels"]
        assert kernel["spilled_bytes"] == kernel["stack_bytes"] == 0, line
        assert 0 < kernel["registers"] <= 255, line
        assert 0 < kernel["shared_bytes"] <= SHARED_BYTES, line
        assert kernel["blocks_at_once"] >= 1, line
    for line in attention:
        assert line["temporaries"] < (SINGLE_BYTES if line["single"] else MIXED_BYTES), line


def test_what_the_compiler_leaves_behind_is_read() -> None:
    report = (
        "ptxas info    : Function properties for product_mosaic_gpu_kernel\n"
        "    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem\n"
    )
    launch = (
        "%145 = gpu.launch async blocks(%arg2, %arg3, %arg4) in (%arg8 = %c2, %arg9 = %c16, %arg10 = %c8) "
        "threads(%arg5, %arg6, %arg7) in (%arg11 = %c384, %arg12 = %c1, %arg13 = %c1) "
        "dynamic_shared_memory_size %c{}_i32 {{\n"
    )
    with kernels_recorded() as read:
        leave(report, launch.format(1) + launch.format(100000))
    (kernel,) = read()
    assert kernel == KernelResources("product", 168, 16, 8, 100000, 384, 256)
    # Of 65,536 registers one block takes 64,512; memory would have room for two.
    assert kernel.blocks_at_once == 1
    assert kernel_table([kernel, kernel])[1:] == [
        "product                 384        168       16      8         97.7               1"
    ]
    assert "MOSAIC_GPU_DUMP_TO" not in os.environ


def test_a_report_in_no_known_form_is_named() -> None:
    with pytest.raises(ValueError, match=r"product_0.ptxas: neither registers nor"), kernels_recorded():
        leave("nothing", "")


def leave(report: str, passes: str) -> None:
    """What a compiler would where it is told to."""
    folder = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    (folder / "product_0.ptxas").write_text(report)
    (folder / "product_0.mlir-passes.log").write_text(passes)
