"""Products by quantised matrices, as `benchmarks.gpu_check` checks and times them, beside XLA's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Target
from pallas_kernels.quantised_matmul import quantised_matmul, unpack_nibbles
from pallas_kernels.quantised_matmul.cases import CASES, LAYER, MatmulCase
from pallas_kernels.quantised_matmul.gpu import obstacle

OPERATION = "quantised_matmul"
FEW_ROWS, MANY_ROWS = (1, 8, 64), 2048
SMALLEST = MatmulCase(3, 256, 64, "int8", rows="int16", num_layers=2)
_LARGE = MatmulCase(1, 8192, 28672, num_layers=1)
_INT4 = dataclasses.replace(_LARGE, storage="uint4x2", group=128, scale_type="bfloat16")
_FP8 = dataclasses.replace(_LARGE, storage="float8_e4m3fn")
_FORMATS = (
    _LARGE,
    dataclasses.replace(_LARGE, rows="int8"),
    dataclasses.replace(_LARGE, rows="int16"),
    _FP8,
    dataclasses.replace(_FP8, rows="float8_e4m3fn"),
    _INT4,
)
TIMED = tuple(
    dataclasses.replace(case, num_rows=rows) for case in _FORMATS for rows in (*FEW_ROWS, MANY_ROWS)
)
"""The feed-forward part of a model of 70 billion parameters."""


def cases() -> list[MatmulCase]:
    """The shared cases that the kernel takes."""
    return [SMALLEST, *(case for case in CASES if _taken(case))]


def _taken(case: MatmulCase) -> bool:
    x, values, scales, zeros, _ = case.shapes()
    assert x is not None
    assert values is not None
    assert scales is not None
    rows, matrices = (x.shape, x.dtype.name), (values.shape, values.dtype.name)
    num_groups = scales.shape[1] if len(scales.shape) == 3 else 0
    return obstacle(rows, matrices, num_groups, zeros is not None) is None


def name(case: MatmulCase) -> str:
    """Of a timed one."""
    group = f"-{case.group}" if case.group else ""
    few = "few rows" if case.num_rows <= max(FEW_ROWS) else "many rows"
    return f"{few} of {case.rows} times {case.storage}{group}: {case.num_rows}"


def by(implementation: str, target: Target) -> Target:
    """A device on which products are made so."""
    return dataclasses.replace(target, overrides=((OPERATION, implementation),))


def multiply(case: MatmulCase, target: Target, *operands: Any) -> jax.Array:
    """One product, of the last layer where there is but one."""
    x, values, scales, zeros, row_scales = operands
    out_type = jnp.float32 if case.rows_scaled else jnp.dtype(case.rows)
    layer = min(LAYER, case.num_layers - 1)
    return quantised_matmul(
        x, values, scales, zeros, layer, row_scale_T=row_scales, out_type=out_type, target=target
    )


def make(case: MatmulCase) -> tuple[Any, ...]:
    """Operands on the device, of numbers that cost nothing to make."""

    def fill(shape: jax.ShapeDtypeStruct | None) -> Any:
        if shape is None:
            return None
        pattern = jnp.arange(np.prod(shape.shape), dtype=jnp.int32).reshape(shape.shape) % 7
        return pattern.astype(shape.dtype)

    return tuple(fill(shape) for shape in case.shapes())


def matrix_bytes(case: MatmulCase) -> float:
    """Of one layer, its scales included."""
    _, values, scales, zeros, _ = case.shapes()
    stored = (array for array in (values, scales, zeros) if array is not None)
    return sum(float(np.prod(array.shape[1:])) * array.dtype.itemsize for array in stored)


def operations(case: MatmulCase) -> float:
    """Of the product."""
    return 2.0 * case.num_rows * case.num_inputs * case.num_outputs


def numbers(case: MatmulCase, target: Target | None = None) -> dict[str, Any]:
    """The largest errors of kernel and reference against double precision, by the size of what is added up.

    `target`: the device; by default that on which jax computes.
    """
    target = Target.of(jax.devices()[0]) if target is None else target
    operands = case.operands()
    x, factor = operands[0].astype(np.float64), 1.0 if operands[4] is None else operands[4][:, None]
    matrix = _exact(case, operands)
    expected, size = x @ matrix.T * factor, np.abs(x) @ np.abs(matrix).T * factor
    errors: dict[str, float] = {}
    for which, implementation in (("kernel", "gpu"), ("reference", "reference")):
        on = by(implementation, target)
        found = jax.jit(lambda *arrays, on=on: multiply(case, on, *arrays))(*operands)
        errors[which] = float(np.max(np.abs(np.asarray(found, np.float64) - expected) / size))
    # In float32 all that differs is the order in which numbers are added, and matrix units add fp8 coarsely.
    right = errors["kernel"] <= max(2 * errors["reference"], 1e-6 if case.rows_scaled else 0.0)
    return {"case": str(case), "errors": errors, "right": right}


def _exact(case: MatmulCase, operands: tuple[Any, ...]) -> np.ndarray:
    """The layer's matrix `[O, I]` in double precision."""
    values, scales, zeros = (None if array is None else array[LAYER] for array in operands[1:4])
    assert values is not None
    assert scales is not None
    stored = np.asarray(unpack_nibbles(jnp.asarray(values))) if case.packed else values
    scale = scales.astype(np.float64).T
    zero = np.full(scale.shape, 8.0 if case.packed else 0.0) if zeros is None else zeros.astype(np.float64).T
    if case.group:
        scale, zero = (np.repeat(array, case.group, axis=1) for array in (scale, zero))
    else:
        scale, zero = scale[:, None], zero[:, None]
    return (stored.astype(np.float64) - zero) * scale
