"""A float of eight bits that a TPU's matrix units widen themselves, and what it makes of fp8."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target

EIGHTH = jnp.float8_e4m3b11fnuz
"""What matrix units of v5 and v6 widen as they take it: e4m3 whose exponents mean four less, with the code of
negative zero for a NaN. Its 16 smallest numbers are even steps from zero, so four bits are such numbers."""
FP8_UNIT = 2.0**4
"""What fp8 is, by the EIGHTH of the same bits."""
_WITHOUT = ("v4", "7x")
"""Chips whose matrix units do not widen EIGHTHs."""


def are_widened(target: Target) -> bool:
    """Whether a target's matrix units do."""
    return not any(name in target.device_kind for name in _WITHOUT)


def from_fp8(words: jax.Array) -> jax.Array:
    """Of e4m3's bits, four numbers a uint32, those of EIGHTHs: zero has no sign, and a NaN only that."""
    sizes = words & jnp.uint32(0x7F7F7F7F)
    is_nan = ((sizes + jnp.uint32(0x01010101)) >> jnp.uint32(7)) & jnp.uint32(0x01010101)
    is_not_zero = sizes + jnp.uint32(0x7F7F7F7F)
    return sizes + is_nan | words & is_not_zero & jnp.uint32(0x80808080)


def from_finite_fp8(words: jax.Array) -> jax.Array:
    """The same for less, but of a NaN the next number there is."""
    is_not_zero = (words & jnp.uint32(0x7F7F7F7F)) + jnp.uint32(0x7F7F7F7F)
    return words & (is_not_zero | jnp.uint32(0x7F7F7F7F))
