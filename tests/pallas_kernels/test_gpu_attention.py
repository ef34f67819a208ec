"""The GPU kernel in JAX's interpreter, held to the same statement and batches as the others."""

from __future__ import annotations

import dataclasses

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Target, choose
from pallas_kernels.ragged_paged_attention.api import IMPLEMENTATIONS
from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase
from tests.pallas_kernels.test_ragged_paged_attention import check, check_single

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX interprets GPU kernels from 0.11.2 on"
)


def taken(case: AttentionCase) -> AttentionCase:
    """A case in the formats that the kernel takes."""
    kv_format = "bfloat16" if case.kv_format == "float32" else case.kv_format
    return dataclasses.replace(case, kv_format=kv_format, storage="", compute="bfloat16")


LONG = AttentionCase(
    128,
    1,
    8,
    "bfloat16",
    compute="bfloat16",
    page_size=256,
    sinks=True,
    context_len=(1100, 0, 70),
    num_rows=(1, 0, 1),
    padded_rows=3,
)
"""Few sequences, of which one is long: its context is cut into parts, of which the short one fills one."""


@interpreted
@pytest.mark.parametrize("case", [*(taken(CASES[i]) for i in (2, 5, 7, 10)), LONG], ids=str)
def test_the_gpu_kernel_attends_to_single_rows(case: AttentionCase) -> None:
    check_single(case, "gpu")


@interpreted
@pytest.mark.parametrize("case", [taken(CASES[i]) for i in (0, 1, 3, 9)], ids=str)
def test_the_gpu_kernel_attends_to_a_mixed_batch(case: AttentionCase) -> None:
    check(case, "gpu")


@pytest.mark.parametrize(
    ("changes", "facts", "reason"),
    [
        ({}, {"capability": "10.0"}, "made for compute capability 9.0, not 10.0"),
        ({}, {"capability": ""}, "not an unknown one"),
        ({}, {"compute": "float32"}, "computes in bfloat16, not float32"),
        ({}, {"queries_per_kv": 65}, "65 queries of a kv head exceed 64"),
        ({"kv_format": "float32"}, {}, "its pages are not of float32"),
        ({"storage": "uint16"}, {}, "pages of bfloat16 are stored as uint16"),
        ({"page_size": 48}, {}, "pages of 48 tokens do not fill blocks of 64"),
        ({"head_size": 256}, {}, "head size 256 exceeds 128"),
    ],
)
def test_a_gpu_takes_the_reference_for_what_the_kernel_cannot_do(
    changes: dict[str, object], facts: dict[str, object], reason: str
) -> None:
    case = dataclasses.replace(LONG, **changes)
    call = {
        "layout": case.layout(),
        "params": case.params(),
        "table_shape": (3, 8),
        "native": False,
        "compute": "bfloat16",
        "queries_per_kv": 8,
        "capability": "9.0",
    }
    gpu = Target("gpu", "NVIDIA H200", capability="9.0")
    name = "ragged_paged_attention"
    assert choose(name, IMPLEMENTATIONS, gpu, **call)[0].name == ("gpu" if not changes else "reference")
    assert choose(name, IMPLEMENTATIONS, gpu, **{**call, **facts})[0].name == "reference"
    forced = dataclasses.replace(gpu, overrides=((name, "gpu"),))
    with pytest.raises(ValueError, match=reason):
        choose(name, IMPLEMENTATIONS, forced, **{**call, **facts})
