"""The GPU kernel in JAX's interpreter, held to the same statement and batches as the others."""

from __future__ import annotations

import dataclasses

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase
from tests.pallas_kernels.test_ragged_paged_attention import check, check_single

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX interprets GPU kernels from 0.11.2 on"
)
SHAPE = {"compute": "bfloat16", "storage": ""}


def taken(case: AttentionCase) -> AttentionCase:
    """A case in the formats that the kernel takes."""
    kv_format = "bfloat16" if case.kv_format == "float32" else case.kv_format
    return dataclasses.replace(case, kv_format=kv_format, **SHAPE)


GPU_CASES = [taken(case) for case in CASES if case.head_size <= 128]


@interpreted
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_gpu_kernel_attends_to_single_rows(case: AttentionCase) -> None:
    check_single(case, "gpu")


@interpreted
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_gpu_kernel_attends_to_a_mixed_batch(case: AttentionCase) -> None:
    check(case, "gpu")
