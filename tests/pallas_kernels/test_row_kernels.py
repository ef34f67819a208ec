"""Norms and gated activations of rows, by XLA and by the kernels for CPU, against numpy in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Target, choices_recorded
from pallas_kernels.gated_activation import gated_activation
from pallas_kernels.rms_norm import add_and_rms_norm, rms_norm

SHAPES = [(1, 576), (3, 1), (2, 7), (5, 64), (4, 3, 80), (300, 130), (70, 2048)]
"""Whole vectors and rests, one thread and several."""
EPS = 1e-5


@pytest.fixture(params=["reference", "cpu"])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "cpu":
        request.getfixturevalue("native_kernels")
    return Target(native=request.param == "cpu")


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("exact_order", [False, True])
def test_norms(shape: tuple[int, ...], exact_order: bool, target: Target) -> None:
    random = np.random.default_rng(len(shape))
    x, y = random.normal(0, 3, (2, *shape)).astype(np.float32)
    weight = random.normal(1, 0.1, shape[-1]).astype(np.float32)
    settings = {"exact_order": exact_order, "target": target}
    ours = jax.jit(functools.partial(rms_norm, eps=EPS, **settings))(x, weight)
    np.testing.assert_allclose(ours, normed(x, weight), rtol=1e-5, atol=1e-6)
    total, ours = jax.jit(functools.partial(add_and_rms_norm, eps=EPS, **settings))(x, y, weight)
    np.testing.assert_array_equal(total, x + y)
    np.testing.assert_allclose(ours, normed(x + y, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 1536), (3, 5), (2, 33), (40, 700)], ids=str)
def test_gated_activations(activation: str, shape: tuple[int, int], target: Target) -> None:
    random = np.random.default_rng(shape[1])
    gate, up = random.normal(0, 4, (2, *shape)).astype(np.float32)
    gate[0, :1], gate[-1, -1:] = 200.0, -200.0
    wide = gate.astype(np.float64)
    bent = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    share = np.where(activation == "silu", 0.5 + 0.5 * np.tanh(wide / 2), 0.5 + 0.5 * np.tanh(bent))
    activate = functools.partial(gated_activation, activation=activation, target=target)
    ours = jax.jit(activate)(np.stack([gate, up], axis=1))
    np.testing.assert_allclose(ours, wide * share * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [2, 5, 64, 257])
def test_a_row_has_the_same_bits_alone_and_among_others(num_rows: int, native_kernels: None) -> None:
    target = Target(native=True)
    random = np.random.default_rng(num_rows)
    x = random.normal(0, 1, (num_rows, 2, 300)).astype(np.float32)
    weight = random.normal(0, 1, 300).astype(np.float32)
    norm = jax.jit(functools.partial(rms_norm, eps=EPS, exact_order=True, target=target))
    activate = jax.jit(functools.partial(gated_activation, activation="silu", target=target))
    together, activated = norm(x[:, 0], weight), activate(x)
    for row in (0, num_rows - 1):
        np.testing.assert_array_equal(norm(x[row : row + 1, 0], weight)[0], together[row])
        np.testing.assert_array_equal(activate(x[row : row + 1])[0], activated[row])


def test_other_numbers_are_left_to_xla(native_kernels: None) -> None:
    target = Target(native=True)
    x, weight = jnp.ones((3, 2, 8), jnp.bfloat16), jnp.ones(8, jnp.bfloat16)
    with choices_recorded() as chosen:
        assert rms_norm(x, weight, EPS, target=target).dtype == jnp.bfloat16
        assert gated_activation(x, "silu", target=target).dtype == jnp.bfloat16
    assert chosen == {"rms_norm": "reference", "gated_activation": "reference"}


def test_shapes_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"rows float32\[2, 3\], float32\[2, 4\] and weights \[3\]"):
        add_and_rms_norm(jnp.zeros((2, 3)), jnp.zeros((2, 4)), jnp.zeros(3), EPS)
    with pytest.raises(ValueError, match=r"weights \[4\]"):
        rms_norm(jnp.zeros((2, 3)), jnp.zeros(4), EPS)
    with pytest.raises(ValueError, match=r"gates and values \[2, 3, 4\] must be \[T, 2, F\]"):
        gated_activation(jnp.zeros((2, 3, 4)), "silu")
