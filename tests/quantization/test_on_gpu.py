"""Which quantised products a GPU's steps leave to the kernel, and that XLA's are what they were."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model.layers import product_flat
from jaxserve.quantization import format_named
from jaxserve.quantization.weight import quantise
from pallas_kernels.dispatch import Target, choices_recorded

H200 = Target("gpu", "NVIDIA H200", capability="9.0")
BY_XLA = dataclasses.replace(H200, overrides=(("quantised_matmul", "reference"),))
OUTPUTS, INPUTS = (2, 64), (4, 64)


def chosen(name: str, num_rows: int) -> str | None:
    """By what a product is made; None for none of the table."""
    weight = quantise(jnp.ones((*OUTPUTS, *INPUTS)), format_named(name), 2)
    x = jax.ShapeDtypeStruct((num_rows, *INPUTS), jnp.bfloat16)
    with choices_recorded() as choices:
        out = jax.eval_shape(lambda x: product_flat(x, weight, target=H200), x)
    assert (out.shape, out.dtype) == ((num_rows, *OUTPUTS), jnp.float32)
    return choices.get("quantised_matmul")


@pytest.mark.parametrize("name", ["int8", "w8a8", "int8-weight-only", "fp8", "fp8-128"])
def test_few_rows_are_multiplied_by_the_kernel_and_many_by_xla(name: str) -> None:
    pytest.importorskip("absl", reason="JAX 0.10.2 cannot import Mosaic GPU without absl-py")
    assert [chosen(name, rows) for rows in (1, 64, 65)] == ["gpu", "gpu", "reference"]


def test_numbers_of_four_bits_are_xlas() -> None:
    assert chosen("int4-128", 8) is None


@pytest.mark.parametrize("name", ["int8", "w8a8", "int8-weight-only", "fp8", "fp8-128", "int4-128"])
def test_xla_multiplies_as_it_does_elsewhere(name: str) -> None:
    random = np.random.default_rng(0)
    weight = quantise(random.normal(size=(*OUTPUTS, *INPUTS)), format_named(name), 2)
    x = jnp.asarray(random.normal(size=(3, *INPUTS)), jnp.bfloat16)
    found, expected = (np.asarray(product_flat(x, weight, target=target)) for target in (BY_XLA, None))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
