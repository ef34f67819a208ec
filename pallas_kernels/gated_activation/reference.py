"""What the operation means, in jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def activate_reference(gate_up_T2F: jax.Array, activation: str) -> jax.Array:
    """See `gated_activation`."""
    gate, up = gate_up_T2F[:, 0].astype(jnp.float32), gate_up_T2F[:, 1].astype(jnp.float32)
    act = jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return (act * up).astype(gate_up_T2F.dtype)
