"""Grouped matmul against a loop over groups, sizes random, empty groups included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_matmul

NUM_GROUPS, NUM_LAYERS, WIDTH, HIDDEN = 5, 3, 12, 8
MAX_ROWS = 64


@jax.jit
def multiply(x: jax.Array, weights: jax.Array, sizes: jax.Array, first: jax.Array) -> jax.Array:
    return grouped_matmul(x, weights, sizes, first, tile_rows=4)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 12), min_size=NUM_GROUPS, max_size=NUM_GROUPS), layer=st.integers(0, 2))
def test_each_group_meets_its_own_matrix(sizes: list[int], layer: int) -> None:
    rng = np.random.default_rng(sum(sizes))
    x = rng.normal(size=(MAX_ROWS, HIDDEN)).astype(np.float32)
    weights = rng.normal(size=(NUM_LAYERS * NUM_GROUPS, WIDTH, HIDDEN)).astype(np.float32)
    out = np.asarray(multiply(x, weights, jnp.asarray(sizes, jnp.int32), jnp.int32(layer * NUM_GROUPS)))
    assert np.isfinite(out).all()
    row = 0
    for group, size in enumerate(sizes):
        expected = x[row : row + size] @ weights[layer * NUM_GROUPS + group].T
        np.testing.assert_allclose(out[row : row + size], expected, atol=1e-4, rtol=1e-4)
        row += size


def test_shapes_that_disagree_are_named() -> None:
    sizes = jnp.zeros((2,), jnp.int32)
    with pytest.raises(ValueError, match=r"rows \(4, 3\) against matrices \(2, 5, 4\)"):
        grouped_matmul(jnp.zeros((4, 3)), jnp.zeros((2, 5, 4)), sizes, 0, tile_rows=4)
    with pytest.raises(ValueError, match="2 groups in a stack of 1"):
        grouped_matmul(jnp.zeros((4, 4)), jnp.zeros((1, 5, 4)), sizes, 0, tile_rows=4)
