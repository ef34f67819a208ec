"""Drafts on the device: tokens that a step takes for known, and keeps while they are what it samples.

A sequence's drafts stand behind its known tokens, where nothing counts until `num_known` says so, and their
keys and values behind the computed ones. Each is compared to what was sampled after the row before it, by
plain decoding's own rule; the counts then move on over those that agree, and nothing is taken back.

Axes: R logit rows, K drafts of a sequence. The rows of a sequence's drafts follow one another, after the row
of its last known token.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxserve.engine.state import DeviceState


@flax.struct.dataclass
class Drafts:
    """What logit rows compute of drafts."""

    token: jax.Array
    """[R] int32 the draft that the row computes, -1 for a known token."""
    ahead: jax.Array
    """[R] int32 how many drafts of its sequence the row has reached, its own included."""

    def before(self, max_drafts: int, *, unused: int) -> jax.Array:
        """[R, K] int32 the drafts up to each row, the latest first; `unused` where there are fewer."""
        back_K = jnp.arange(max_drafts, dtype=jnp.int32)
        row_R = jnp.arange(self.token.shape[0], dtype=jnp.int32)
        token_RK = self.token[jnp.maximum(row_R[:, None] - back_K, 0)]
        return jnp.where(back_K < self.ahead[:, None], token_RK, unused)


def enter_drafts(
    state: DeviceState, drafts: Drafts, slot_R: jax.Array, position_R: jax.Array, padding_slot: int
) -> DeviceState:
    """Write the drafts at their rows' positions."""
    is_draft_R = drafts.token >= 0
    slot_R = jnp.where(is_draft_R, slot_R, padding_slot)
    position_R = jnp.where(is_draft_R, position_R, 0)
    return dataclasses.replace(state, tokens=state.tokens.at[slot_R, position_R].set(drafts.token))


def is_accepted(drafts: Drafts, sampled_R: jax.Array) -> jax.Array:
    """[R] whether every draft up to the row is what was sampled after the row before it."""
    wrong_R = (drafts.token >= 0) & (drafts.token != jnp.roll(sampled_R, 1))
    num_wrong_R = jnp.cumsum(wrong_R, dtype=jnp.int32)
    first_R = jnp.arange(sampled_R.shape[0], dtype=jnp.int32) - drafts.ahead
    return num_wrong_R == num_wrong_R[first_R]
