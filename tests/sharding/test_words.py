"""What the host of one process says to all comes as it was, to the bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.engine.words import as_words, from_words, parts, spoken_to

FLOATS = np.array([0.0, -0.0, np.inf, np.nan, 1e-40, -3.5], np.float32)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_every_bit_of_a_float_arrives(dtype: Any) -> None:
    numbers = FLOATS.astype(dtype).reshape(2, 3)
    given = numbers, np.array([7, -1], np.int32), np.float32(-0.0), np.arange(5, dtype=np.uint8)
    told = jax.jit(lambda words: from_words(words, given))(as_words(given))
    for one, other in zip(given, told, strict=True):
        assert (other.shape, other.dtype) == (one.shape, one.dtype)
        assert np.asarray(other).tobytes() == one.tobytes()


def test_a_program_takes_words_in_place_of_what_the_host_has() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    given = np.array([2, 3], np.int32), np.float32(0.5)
    program = spoken_to(lambda own, many, one: own * jnp.sum(many) + one, 1, given, mesh)
    told = jax.jit(program)(jnp.float32(10), parts(as_words(given), mesh))
    assert float(told) == 50.5
