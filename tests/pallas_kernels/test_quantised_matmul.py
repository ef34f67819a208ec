"""Rows times a quantised matrix of a stack: reference and TPU kernels, against sums in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Target
from pallas_kernels.quantised_matmul import pack_nibbles, quantised_matmul, unpack_nibbles
from pallas_kernels.quantised_matmul.cases import CASES, LAYER, MatmulCase

BY_TPU = Target(overrides=(("quantised_matmul", "tpu"),))
ROUNDING = {"float32": 2.0**-22, "bfloat16": 2.0**-8}
"""A type's distance from any number, by that number: once for a product's weight, once for its result."""


def multiply(case: MatmulCase, operands: tuple[Any, ...], target: Target | None = None) -> np.ndarray:
    out_type = jnp.float32 if case.rows_scaled else jnp.dtype(case.rows)

    @jax.jit
    def run(x: Any, values: Any, scales: Any, zeros: Any, row_scales: Any, layer: Any) -> jax.Array:
        return quantised_matmul(
            x, values, scales, zeros, layer, row_scale_T=row_scales, out_type=out_type, target=target
        )

    return np.asarray(run(*operands, LAYER), np.float64)


def numbers(case: MatmulCase, operands: tuple[Any, ...]) -> np.ndarray:
    """The layer's matrix in float64, `[O, I]`, unpacked bit by bit."""
    _, values, scales, zeros, _ = operands
    stored = values[LAYER]
    if case.packed:
        halves = stored.reshape(case.num_outputs, -1, 128 if case.num_inputs % 256 == 0 else 1)
        stored = np.stack([halves % 16, halves // 16], axis=2).reshape(case.num_outputs, -1)
    scale = scales[LAYER].astype(np.float64).T
    zero = np.full(scale.shape, 8 if case.packed else 0) if zeros is None else zeros[LAYER].T
    if case.group:
        scale, zero = (np.repeat(array, case.group, axis=1) for array in (scale, zero))
    else:
        scale, zero = scale[:, None], zero[:, None]
    return (stored.astype(np.float64) - zero) * scale


def error(case: MatmulCase, operands: tuple[Any, ...], target: Target | None) -> np.ndarray:
    """By the size of what is added up."""
    x, row_scales, matrix = operands[0].astype(np.float64), operands[4], numbers(case, operands)
    factor = 1.0 if row_scales is None else row_scales[:, None]
    found = multiply(case, operands, target)
    assert found.shape == (case.num_rows, case.num_outputs)
    return np.abs(found - x @ matrix.T * factor) / (np.abs(x) @ np.abs(matrix).T * factor)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_right(case: MatmulCase) -> None:
    # Of integers the sums are exact, so three roundings of their scaling are left; products of fp8 are exact,
    # and as with float32 what is left is the rounding of sums; otherwise weights and
    # results are rounded to the type of the rows, and sums are float32.
    rounding = ROUNDING["float32" if case.rows_scaled else case.rows]
    assert np.max(error(case, case.operands(), None)) < 2 * rounding


@pytest.mark.parametrize("case", [case for case in CASES if case.rows != "float8_e4m3fn"], ids=str)
def test_the_tpu_kernels_round_as_the_reference_does(case: MatmulCase) -> None:
    operands = case.operands()
    found, reference = (error(case, operands, target) for target in (BY_TPU, None))
    # In float32 all that differs is the order in which numbers are added.
    factor = 4 if case.rows == "float32" else 1.5
    assert np.max(found) < factor * np.max(reference)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.rows == "bfloat16" and case.storage != "int8" and case.num_rows < 10],
    ids=str,
)
def test_chips_that_widen_nothing_on_the_way_round_no_more(case: MatmulCase) -> None:
    target = Target(device_kind="TPU7x", overrides=BY_TPU.overrides)
    operands = case.operands()
    found, reference = (error(case, operands, target) for target in (target, None))
    assert np.max(found) < 1.5 * np.max(reference)


@pytest.mark.parametrize("rows", ["float32", "bfloat16"])
@pytest.mark.parametrize("device_kind", ["TPU v5 lite", "TPU7x"])
def test_every_code_of_fp8_is_the_number_that_it_stands_for(rows: str, device_kind: str) -> None:
    case = MatmulCase(8, 256, 256, "float8_e4m3fn", rows=rows)
    x, values, scales, *rest = case.operands()
    codes = np.arange(256, dtype=np.uint8).view(values.dtype)
    values[LAYER], x[...], scales[...] = 0, 0, 1
    values[LAYER, :, 5], x[:, 5] = codes, 1
    target = Target(device_kind=device_kind, overrides=BY_TPU.overrides)
    found = multiply(case, (x, values, scales, *rest), target)
    np.testing.assert_array_equal(found, np.broadcast_to(codes.astype(np.float64), (8, 256)))


@pytest.mark.parametrize("by", ["tpu", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        MatmulCase(5, 384, 192, rows="int16", num_layers=11),
        MatmulCase(100, 256, 320, num_layers=3),
        MatmulCase(3, 256, 192, "uint4x2", group=64, zeros=True),
        MatmulCase(70, 256, 192, group=128, zeros=True),
    ],
    ids=str,
)
def test_a_bias_is_added_before_the_result_is_rounded(case: MatmulCase, by: str) -> None:
    x, values, scales, zeros, row_scales = case.operands()
    bias = np.full(values.shape[:2], np.nan, np.float32)
    bias[LAYER] = np.random.default_rng(1).normal(0, 100, values.shape[1])
    target = Target(overrides=(("quantised_matmul", by),))

    def run(bias_LO: np.ndarray | None, out_type: Any) -> np.ndarray:
        @jax.jit
        def multiplied(*arrays: Any) -> jax.Array:
            settings = {"row_scale_T": row_scales, "bias_LO": bias_LO, "out_type": out_type, "target": target}
            return quantised_matmul(*arrays, LAYER, **settings)

        return np.asarray(multiplied(x, values, scales, zeros), np.float64)

    exact = run(None, jnp.float32) + bias[LAYER]
    # Of what is added up, whose sum may be near nothing.
    size = np.abs(run(None, jnp.float32)) + np.abs(bias[LAYER])
    for out_type, rounding in ((jnp.float32, 0.0), (jnp.bfloat16, 2.0**-8)):
        found = run(bias, out_type)
        # Once to the type, and in float32 the sum.
        assert np.max(np.abs(found - exact) - rounding * np.abs(exact) - 2.0**-22 * size) <= 0


@pytest.mark.parametrize("by", ["tpu", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        MatmulCase(5, 384, 192, rows="int16", num_layers=11),
        MatmulCase(100, 256, 320, num_layers=11),
        MatmulCase(3, 256, 192, "uint4x2", group=64, zeros=True),
        MatmulCase(70, 256, 192, group=128, zeros=True),
    ],
    ids=str,
)
def test_scales_zeros_and_biases_may_be_those_of_the_layer_alone(case: MatmulCase, by: str) -> None:
    x, values, scales, zeros, row_scales = case.operands()
    bias = np.random.default_rng(1).normal(0, 100, values.shape[:2]).astype(np.float32)
    target = Target(overrides=(("quantised_matmul", by),))

    @jax.jit
    def multiplied(x: Any, values: Any, scales: Any, zeros: Any, bias: Any) -> jax.Array:
        settings = {"row_scale_T": row_scales, "bias_LO": bias, "target": target}
        return quantised_matmul(x, values, scales, zeros, LAYER, **settings)

    own = [None if array is None else array[LAYER : LAYER + 1] for array in (scales, zeros, bias)]
    np.testing.assert_array_equal(multiplied(x, values, *own), multiplied(x, values, scales, zeros, bias))


@pytest.mark.parametrize("num_inputs", [10, 512])
def test_numbers_of_four_bits_are_unpacked_as_they_were_packed(num_inputs: int) -> None:
    values = np.random.default_rng(0).integers(0, 16, (3, num_inputs))
    packed = pack_nibbles(values)
    assert packed.dtype == np.uint8
    assert packed.shape == (3, num_inputs // 2)
    np.testing.assert_array_equal(unpack_nibbles(jnp.asarray(packed)), values)
    np.testing.assert_array_equal(pack_nibbles(jnp.asarray(values)), packed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": ((2, 300), "float32")}, r"rows \(2, 300\) times a stack \(2, 64, 256\)"),
        ({"values": ((2, 64, 256), "int16")}, "a matrix of int16: choose from int8, float8_e4m3fn, uint8"),
        ({"scales": ((2, 63), "float32")}, r"scales \(2, 63\) of a stack \(2, 64, 256\)"),
        ({"scales": ((2, 3, 64), "float32")}, "3 groups of 256 inputs"),
        ({"zeros": ((2, 4, 64), "int8")}, r"zeros \(2, 4, 64\) beside scales \(2, 64\)"),
        ({"x": ((2, 256), "int8")}, r"rows \(2, 256\) of int8 want a scale each, not None"),
        ({"bias_LO": ((64,), "float32")}, r"biases \(64,\) of a stack \(2, 64, 256\)"),
        ({"row_scale_T": ((2,), "float32")}, "rows of float32 have no scales of their own"),
        (
            {"x": ((2, 256), "int8"), "row_scale_T": ((2,), "float32"), "scales": ((2, 4, 64), "float32")},
            r"rows of int8 want a matrix of int8 with a scale a channel, not int8 with scales \(2, 4, 64\)",
        ),
    ],
)
def test_what_disagrees_is_named(changes: dict[str, Any], message: str) -> None:
    shapes: dict[str, Any] = {
        "x": ((2, 256), "float32"),
        "values": ((2, 64, 256), "int8"),
        "scales": ((2, 64), "float32"),
    } | changes
    arrays = {name: jnp.zeros(*shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        quantised_matmul(
            arrays["x"],
            arrays["values"],
            arrays["scales"],
            arrays.get("zeros"),
            0,
            row_scale_T=arrays.get("row_scale_T"),
            bias_LO=arrays.get("bias_LO"),
        )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (MatmulCase(2, 576, 64, "uint4x2", group=32), "576 inputs are no multiple of 256"),
        (MatmulCase(2, 256, 64, "uint4x2"), "numbers of four bits, or zeros, with one scale a channel"),
        (MatmulCase(2, 384, 64, group=96), "groups of 96 inputs do not fit into 128 lanes"),
    ],
    ids=str,
)
def test_what_a_kernel_cannot_take_is_named(case: MatmulCase, message: str) -> None:
    operands = case.operands()
    with pytest.raises(ValueError, match=message):
        multiply(case, operands, BY_TPU)
    if not case.packed or case.group:
        multiply(case, operands, Target("tpu"))  # By the reference.
