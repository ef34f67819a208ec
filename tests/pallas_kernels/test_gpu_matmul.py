"""The GPU kernel for quantised matrices in JAX's interpreter, held to the same statement as the others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Target, choose
from pallas_kernels.quantised_matmul.api import IMPLEMENTATIONS
from pallas_kernels.quantised_matmul.cases import CASES, LAYER, MatmulCase
from pallas_kernels.quantised_matmul.gpu import obstacle
from tests.pallas_kernels.test_quantised_matmul import error, multiply

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX interprets GPU kernels from 0.11.2 on"
)
NAME = "quantised_matmul"
BY_GPU = Target(overrides=((NAME, "gpu"),))
H200 = Target("gpu", "NVIDIA H200", capability="9.0")


def facts(case: MatmulCase, **changes: object) -> dict[str, object]:
    """What is static about a product."""
    x, values, scales, zeros, _ = case.shapes()
    assert x is not None
    assert values is not None
    assert scales is not None
    known = {
        "rows": (x.shape, x.dtype.name),
        "values": (values.shape, values.dtype.name),
        "num_groups": scales.shape[1] if len(scales.shape) == 3 else 0,
        "has_zeros": zeros is not None,
        "capability": "9.0",
    }
    return known | changes


TAKEN = [case for case in CASES if obstacle(**facts(case)) is None]  # pyright: ignore[reportArgumentType]
SPLIT = (
    MatmulCase(20, 1024, 256),
    MatmulCase(64, 1152, 64, rows="int16"),
    MatmulCase(1, 1024, 128, "float8_e4m3fn", rows="float8_e4m3fn"),
    MatmulCase(2, 2048, 128, "uint4x2", group=128, scale_type="bfloat16"),
)
"""Few outputs of many inputs, which are cut into parts."""


def test_most_of_the_shared_cases_are_taken() -> None:
    assert {(case.storage, case.rows, bool(case.group), case.zeros) for case in TAKEN} >= {
        ("int8", "int8", False, False),
        ("int8", "int16", False, False),
        ("int8", "bfloat16", False, False),
        ("int8", "bfloat16", True, True),
        ("float8_e4m3fn", "bfloat16", False, False),
        ("float8_e4m3fn", "bfloat16", True, False),
        ("float8_e4m3fn", "float8_e4m3fn", False, False),
        ("uint4x2", "bfloat16", True, False),
        ("uint4x2", "bfloat16", True, True),
    }
    assert {case.num_rows for case in TAKEN} >= {1, 3, 20, 100, 130}


@interpreted
@pytest.mark.parametrize("case", [*TAKEN, *SPLIT], ids=str)
def test_the_gpu_kernel_rounds_as_the_reference_does(case: MatmulCase) -> None:
    operands = case.operands()
    found, reference = (error(case, operands, target) for target in (BY_GPU, None))
    # Where nothing is rounded but sums in float32, all that differs is the order in which numbers are added.
    factor = 4 if case.rows_scaled and not case.integer else 1.5
    assert np.max(found) < factor * np.max(reference)


@interpreted
def test_every_code_of_fp8_is_the_number_that_it_stands_for() -> None:
    case = MatmulCase(8, 256, 256, "float8_e4m3fn")
    x, values, scales, *rest = case.operands()
    codes = np.arange(256, dtype=np.uint8).view(values.dtype)
    values[LAYER], x[...], scales[...] = 0, 0, 1
    values[LAYER, :, 5], x[:, 5] = codes, 1
    found = multiply(case, (x, values, scales, *rest), BY_GPU)
    np.testing.assert_array_equal(found, np.broadcast_to(codes.astype(np.float64), (8, 256)))


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        (MatmulCase(8, 256, 256), {"capability": "10.0"}, "made for compute capability 9.0, not 10.0"),
        (MatmulCase(8, 256, 256), {"capability": ""}, "not an unknown one"),
        (MatmulCase(8, 256, 256, rows="float32"), {}, "rows of float32"),
        (MatmulCase(8, 256, 96), {}, "96 outputs are no multiple of 64"),
        (MatmulCase(8, 224, 64), {}, "outputs of 224 bytes are no multiple of 64"),
        (MatmulCase(8, 384, 64, "uint4x2", group=64), {}, "384 inputs are no multiple of 256"),
        (MatmulCase(8, 256, 64, "uint4x2", group=16), {}, "groups of 16 inputs are no multiple of 32"),
        (MatmulCase(8, 256, 64, "uint4x2"), {}, "numbers of four bits, or zeros, with one scale a channel"),
    ],
    ids=str,
)
def test_a_gpu_takes_the_reference_for_what_the_kernel_cannot_do(
    case: MatmulCase, changes: dict[str, object], reason: str
) -> None:
    assert choose(NAME, IMPLEMENTATIONS, H200, **facts(case, **changes))[0].name == "reference"
    forced = dataclasses.replace(H200, overrides=((NAME, "gpu"),))
    with pytest.raises(ValueError, match=reason):
        choose(NAME, IMPLEMENTATIONS, forced, **facts(case, **changes))


def test_many_rows_are_left_to_xla_unless_the_kernel_is_named() -> None:
    few, many = MatmulCase(64, 4096, 4096), MatmulCase(65, 4096, 4096)
    assert choose(NAME, IMPLEMENTATIONS, H200, **facts(few))[0].name == "gpu"
    assert choose(NAME, IMPLEMENTATIONS, H200, **facts(many))[0].name == "reference"
    forced = dataclasses.replace(H200, overrides=((NAME, "gpu"),))
    assert choose(NAME, IMPLEMENTATIONS, forced, **facts(many))[0].name == "gpu"
    by_xla = dataclasses.replace(H200, overrides=((NAME, "reference"),))
    assert choose(NAME, IMPLEMENTATIONS, by_xla, **facts(few))[0].name == "reference"
