"""Rounding to every format and back, the room it takes, and products against numpy in float64."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.model.layers import product, product_flat, take_rows
from jaxserve.quantization import (
    FORMATS,
    RECIPES,
    Recipe,
    WeightFormat,
    format_named,
    recipe_named,
    recipe_of_label,
)
from jaxserve.quantization.weight import QuantisedWeight, blank, dequantise, quantise
from pallas_kernels.int8_matmul import quantise_rows
from tests.quantization.oracle import stored_numbers

NAMES = list(FORMATS)
SHAPE, NUM_INPUT_AXES = (6, 4, 3, 32), 3


def matrix(seed: int, magnitude: float = 1.0) -> np.ndarray:
    """Channels of very different sizes, one of them zero and one of a single sign."""
    rng = np.random.default_rng(seed)
    array = rng.normal(size=SHAPE) * magnitude * 10.0 ** rng.uniform(-3, 3, (SHAPE[0], 1, 1, 1))
    array[0] = 0.0
    array[1] = np.abs(array[1])
    return array.astype(np.float32)


def largest_error(format: WeightFormat, weight: QuantisedWeight, flat: np.ndarray) -> np.ndarray:
    """For each number how far the nearest one of the format may be."""
    scales = np.asarray(weight.scales).astype(np.float64)
    step = np.repeat(scales.reshape(len(flat), -1), flat.shape[1] // (scales.size // len(flat)), axis=1)
    if format.storage == "float8_e4m3fn":  # Three bits after the first; below 2 ** -6 steps of 2 ** -9.
        return np.maximum(np.abs(flat) * 2.0**-4, step * 2.0**-10) * 1.001
    # A zero of its own is rounded too, which may move the range's end by half a step.
    return step * (1.1 if format.zeros else 0.505)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**16), magnitude=st.sampled_from([1e-6, 1.0, 1e4]))
def test_every_number_comes_back_within_the_formats_step(name: str, seed: int, magnitude: float) -> None:
    array, format = matrix(seed, magnitude), format_named(name)
    weight = quantise(array, format, NUM_INPUT_AXES)
    flat = array.reshape(SHAPE[0], -1).astype(np.float64)
    back = stored_numbers(weight)
    assert np.all(np.abs(back - flat) <= largest_error(format, weight, flat))
    assert not back[0].any()
    np.testing.assert_allclose(np.asarray(dequantise(weight)).reshape(back.shape), back, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_takes_its_bits_and_its_scales(name: str) -> None:
    format = format_named(name)
    weight = quantise(matrix(0), format, NUM_INPUT_AXES)
    num_inputs = 4 * 3 * 32
    num_groups = SHAPE[0] * (num_inputs // format.group if format.group else 1)
    expected = SHAPE[0] * num_inputs * format.bits // 8 + num_groups * (2 if format.group else 4)
    expected += num_groups if format.zeros else 0
    assert sum(array.nbytes for array in jax.tree.leaves(weight)) == expected
    assert format.num_bytes(SHAPE[0], num_inputs) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_products_are_those_of_the_rounded_numbers(name: str, num_rows: int, dtype: str) -> None:
    x = np.random.default_rng(num_rows).normal(size=(num_rows, *SHAPE[1:])).astype(np.float32)
    rows = jnp.asarray(x).astype(dtype)
    weight = quantise(matrix(1), format_named(name), NUM_INPUT_AXES)
    values = stored_numbers(weight)
    if weight.format.group and dtype == "bfloat16":  # which such a matrix is rounded to
        values = np.asarray(jnp.asarray(values, jnp.float32).astype(dtype)).astype(np.float64)
    x_flat = np.asarray(rows.astype(jnp.float32)).reshape(num_rows, -1)
    if bits := weight.format.row_bits:
        whole, scale = (np.asarray(part, np.float64) for part in quantise_rows(rows, bits))
        rounded = whole.reshape(num_rows, -1) * scale[:, None]
        assert np.all(np.abs(rounded - x_flat) <= 0.5001 * scale[:, None])
        assert np.abs(whole).max() == 2 ** (bits - 1) - 1
        x_flat = rounded
    expected = x_flat.astype(np.float64) @ values.T
    size = np.abs(x_flat) @ np.abs(values).T
    for ours in (product(rows, weight), product_flat(rows, weight)):
        assert (ours.dtype, ours.shape) == (jnp.float32, expected.shape)
        assert np.all(np.abs(np.asarray(ours) - expected) <= 1e-6 * size + 1e-12)


def test_an_int8_product_is_the_same_bits_for_any_company() -> None:
    x = np.random.default_rng(0).normal(size=(65, *SHAPE[1:])).astype(np.float32)
    weight = quantise(matrix(1), format_named("int8"), NUM_INPUT_AXES)
    run = jax.jit(product_flat)
    whole = np.asarray(run(x, weight))
    for first, last in ((0, 1), (3, 5), (7, 23), (1, 65)):
        np.testing.assert_array_equal(run(x[first:last], weight), whole[first:last])


@pytest.mark.parametrize("name", NAMES)
def test_a_table_gives_the_rows_that_were_asked_for(name: str) -> None:
    table = quantise(matrix(2).reshape(SHAPE[0], -1), format_named(name))
    taken = take_rows(table, jnp.asarray([4, 0, 99]), jnp.dtype("float32"))
    np.testing.assert_allclose(taken, stored_numbers(table)[[4, 0, SHAPE[0] - 1]], rtol=1e-6)


@pytest.mark.parametrize(("num_inputs", "size"), [(576, 64), (640, 64), (172, 43), (48, 48), (32, 32)])
def test_a_group_that_does_not_divide_the_inputs_is_smaller(num_inputs: int, size: int) -> None:
    assert format_named("int4-64").group_size(num_inputs) == size
    array = np.random.default_rng(0).normal(size=(2, num_inputs)).astype(np.float32)
    assert quantise(array, format_named("int4-64")).scales.shape == (2, num_inputs // size)


READ = (
    "int4",
    "int4-zeros",
    "int4-48-f32",
    "int4-96-zeros",
    "int8-weight-only-zeros",
    "int8-weight-only-128",
    "int8-weight-only-32-zeros-f32",
    "fp8-128-f32",
    "fp8-32",
)
"""Formats that checkpoints hold matrices in, and that nothing is rounded to here."""


def drawn(format: WeightFormat, num_input_axes: int = NUM_INPUT_AXES) -> QuantisedWeight:
    """Any values, scales and zeros that the format has."""
    rng = np.random.default_rng(5)

    def draw(array: jax.Array, low: int, high: int) -> jax.Array:
        return jnp.asarray(rng.integers(low, high, array.shape), array.dtype)

    empty = blank(SHAPE, format, num_input_axes)
    low, high = (0, 256) if format.bits == 4 else (-128, 128)
    zeros = None if empty.zeros is None else draw(empty.zeros, 0 if format.bits == 4 else low, 16)
    scales = jnp.asarray(rng.uniform(0.01, 0.1, empty.scales.shape), empty.scales.dtype)
    return QuantisedWeight(draw(empty.values, low, high), scales, zeros, format)


@pytest.mark.parametrize("name", READ)
def test_formats_that_are_only_read_are_computed_with(name: str) -> None:
    format = format_named(name)
    assert (format.name, format_named(format.name)) == (name, format)
    weight = drawn(format)
    numbers = stored_numbers(weight)
    np.testing.assert_allclose(np.asarray(dequantise(weight)).reshape(numbers.shape), numbers, rtol=1e-6)
    x = np.random.default_rng(0).normal(size=(3, *SHAPE[1:])).astype(np.float32)
    flat = x.reshape(3, -1).astype(np.float64)
    for ours in (product(x, weight), product_flat(x, weight)):
        bound = 1e-6 * (np.abs(flat) @ np.abs(numbers).T) + 1e-12
        assert np.all(np.abs(np.asarray(ours) - flat @ numbers.T) <= bound)
    num_inputs = 4 * 3 * 32
    assert sum(array.nbytes for array in jax.tree.leaves(weight)) == format.num_bytes(SHAPE[0], num_inputs)
    with pytest.raises(ValueError, match=f"{name} is only read; arrays are rounded to int8"):
        quantise(matrix(0), format, NUM_INPUT_AXES)


@pytest.mark.parametrize("name", NAMES)
def test_a_blank_matrix_has_the_shapes_of_a_rounded_one(name: str) -> None:
    rounded = quantise(matrix(0), format_named(name), NUM_INPUT_AXES)
    empty = blank(SHAPE, format_named(name), NUM_INPUT_AXES)
    assert jax.tree.structure(empty) == jax.tree.structure(rounded)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), empty) == jax.tree.map(
        lambda x: (x.shape, x.dtype), rounded
    )


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match=r"int4-32 of an array \(2, 7\), whose last axis is odd"):
        quantise(np.zeros((2, 7), np.float32), format_named("int4-32"))
    for name in ("int8-32", "int8-zeros"):
        with pytest.raises(
            ValueError, match=f"{name}': rows of integers need one scale a channel, and no zeros"
        ):
            format_named(name)
    with pytest.raises(ValueError, match="'fp8-32-zeros': fp8 has no zeros"):
        format_named("fp8-32-zeros")
    with pytest.raises(ValueError, match="'int3' is not one of int8, w8a8, int8-weight-only, fp8"):
        format_named("int3")
    with pytest.raises(ValueError, match="'q4' is not one of f32, bf16, int8"):
        recipe_named("q4")
    with pytest.raises(ValueError, match="recipe 'mine', 'head': weight format 'int3' is not one of"):
        Recipe("mine", 1, (("head", "int3"),))


def test_the_first_rule_that_fits_counts() -> None:
    recipe = Recipe("mixed", 3, (("head", "int8"), ("layers.*.down", "int4-64"), ("layers.1?.*", "fp8")))
    formats = [recipe.format_of(name) for name in ("head", "layers.12.down", "layers.12.o", "layers.2.o")]
    assert [format and format.name for format in formats] == ["int8", "int4-64", "fp8", None]
    assert recipe.label == "mixed@3"


def test_a_recipe_can_be_a_format_or_rules() -> None:
    for name, ends in (("int8-weight-only", "int8-weight-only"), ("fp8-128", "int8-weight-only")):
        everywhere = recipe_named(name)
        formats = [everywhere.format_of(parameter) for parameter in ("embed", "head", "layers.3.o")]
        assert [format and format.name for format in formats] == [ends, ends, name]
    four_bits = recipe_named("int4-128-zeros")
    formats = [four_bits.format_of(name) for name in ("embed", "head", "layers.3.o")]
    assert [format and format.name for format in formats] == ["int8-weight-only"] * 2 + ["int4-128-zeros"]
    mixed = recipe_named("head=int8, *.down = fp8,layers.*=int4-64")
    formats = [mixed.format_of(name) for name in ("head", "layers.0.down", "layers.0.o", "embed")]
    assert [format and format.name for format in formats] == ["int8", "fp8", "int4-64", None]
    assert recipe_of_label(mixed.label) == mixed
    assert not mixed.sums_integers
    assert recipe_named("head=w8a8,*=int8").sums_integers
    for text, message in (
        ("head=", "'head=' is no rule"),
        ("head=int8,,*=int4-64", "'' is no rule"),
        ("=int8", "'=int8' is no rule"),
        ("*=int3", "weight format 'int3' is not one of"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            recipe_named(text)


def test_every_recipe_has_its_own_name() -> None:
    assert {name: recipe.name for name, recipe in RECIPES.items()} == {name: name for name in RECIPES}
