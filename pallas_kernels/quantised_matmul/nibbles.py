"""Two numbers of four bits in a byte.

Where 256 divides the numbers of a row, a byte holds two that are 128 apart, the first in its low half: both
halves of 128 bytes are then 128 neighbours, as many as a TPU's vector has lanes, and nothing need be
interleaved. In other rows a byte holds two neighbours.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

PAIR_DISTANCE = 128


def pair_distance(num_inputs: int) -> int:
    """How far apart the two numbers of a byte are, in rows of so many."""
    return 1 if num_inputs % (2 * PAIR_DISTANCE) else PAIR_DISTANCE


def pack_nibbles(values: Any) -> Any:
    """uint8 of half the last axis, from numbers of 0 to 15; numpy or jax, as they are."""
    distance = pair_distance(values.shape[-1])
    pairs = values.astype("uint8").reshape(*values.shape[:-1], -1, 2, distance)
    packed = pairs[..., 0, :] | (pairs[..., 1, :] << 4)
    return packed.reshape(*values.shape[:-1], -1)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """The int32 numbers that `pack_nibbles` packed."""
    distance = pair_distance(2 * packed.shape[-1])
    grouped = packed.reshape(*packed.shape[:-1], -1, distance)
    pairs = jnp.stack([grouped & 0x0F, grouped >> 4], axis=-2).astype(jnp.int32)
    return pairs.reshape(*packed.shape[:-1], -1)
