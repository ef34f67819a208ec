"""Grouped MLP against a loop over choices, sizes random, empty groups and surplus choices included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_mlp import grouped_mlp

NUM_GROUPS, NUM_LAYERS, WIDTH, HIDDEN, NUM_ROWS = 5, 3, 12, 8, 12
MAX_CHOICES = NUM_GROUPS * NUM_ROWS


@jax.jit
def run(
    x: jax.Array,
    row: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    sizes: jax.Array,
    first: jax.Array,
) -> jax.Array:
    return grouped_mlp(
        x, row, weight, gate_up, down, sizes, first, multiply=multiply, activate=product, tile_rows=4
    )


def multiply(x_mK: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.tensordot(x_mK, matrix, (1, -1), precision="highest")


def product(gate_up_m2F: jax.Array) -> jax.Array:
    return gate_up_m2F[:, 0] * gate_up_m2F[:, 1]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, NUM_ROWS), min_size=NUM_GROUPS, max_size=NUM_GROUPS),
    layer=st.integers(0, NUM_LAYERS - 1),
)
def test_each_choice_meets_its_own_matrices(sizes: list[int], layer: int) -> None:
    rng = np.random.default_rng(sum(sizes))
    x = rng.normal(size=(NUM_ROWS, HIDDEN)).astype(np.float32)
    gate_up = rng.normal(size=(NUM_LAYERS * NUM_GROUPS, 2, WIDTH, HIDDEN)).astype(np.float32)
    down = rng.normal(size=(NUM_LAYERS * NUM_GROUPS, HIDDEN, WIDTH)).astype(np.float32)
    rows = np.concatenate([rng.permutation(NUM_ROWS)[:size] for size in sizes])
    # What comes after the last group belongs to no one.
    rows = np.concatenate([rows, rng.integers(0, NUM_ROWS, MAX_CHOICES - len(rows))]).astype(np.int32)
    weight = rng.normal(size=MAX_CHOICES).astype(np.float32)
    out = run(x, rows, weight, gate_up, down, jnp.asarray(sizes, jnp.int32), jnp.int32(layer * NUM_GROUPS))
    expected = np.zeros((NUM_ROWS, HIDDEN))
    for choice, group in enumerate(np.repeat(np.arange(NUM_GROUPS), sizes) + layer * NUM_GROUPS):
        both = gate_up[group].astype(np.float64) @ x[rows[choice]]
        expected[rows[choice]] += weight[choice] * (down[group] @ (both[0] * both[1]))
    np.testing.assert_allclose(out, expected, atol=1e-3, rtol=1e-4)


def test_a_row_sums_alike_whatever_else_is_chosen() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(NUM_ROWS, HIDDEN)).astype(np.float32)
    gate_up = rng.normal(size=(NUM_GROUPS, 2, WIDTH, HIDDEN)).astype(np.float32)
    down = rng.normal(size=(NUM_GROUPS, HIDDEN, WIDTH)).astype(np.float32)

    def row_zero(others: list[int]) -> np.ndarray:
        chosen = [[0, *others], others, [*others, 0], [0], []]
        rows = np.zeros(MAX_CHOICES, np.int32)
        flat = np.concatenate(chosen).astype(np.int32)
        rows[: len(flat)] = flat
        sizes = jnp.asarray([len(group) for group in chosen], jnp.int32)
        weight = np.ones(MAX_CHOICES, np.float32)
        return np.asarray(run(x, rows, weight, gate_up, down, sizes, jnp.int32(0)))[0]

    np.testing.assert_array_equal(row_zero([]), row_zero([5, 2, 7, 1, 3, 11, 8]))


def test_shapes_that_disagree_are_named() -> None:
    row, weight, sizes = jnp.zeros((4,), jnp.int32), jnp.zeros((4,)), jnp.zeros((2,), jnp.int32)
    gate_up, down = jnp.zeros((2, 2, 5, 4)), jnp.zeros((2, 4, 5))

    def check(message: str, x: jax.Array, gate_up: jax.Array, down: jax.Array, weight: jax.Array) -> None:
        with pytest.raises(ValueError, match=message):
            grouped_mlp(
                x, row, weight, gate_up, down, sizes, 0, multiply=multiply, activate=product, tile_rows=4
            )

    x = jnp.zeros((4, 4))
    check(r"rows \(4, 3\) through \(2, 2, 5, 4\)", jnp.zeros((4, 3)), gate_up, down, weight)
    check(r"and \(2, 5, 4\)", x, gate_up, jnp.zeros((2, 5, 4)), weight)
    check(r"\(4,\) choices with \(3,\) weights", x, gate_up, down, weight[:3])
    check("2 groups in a stack of 1", x, gate_up[:1], down[:1], weight)
