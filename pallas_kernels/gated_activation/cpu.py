"""For CPU, in C++ (`cpu.cc`): on all threads, where XLA takes one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native import GATED_ACTIVATION

_NUMBERS = ("silu", "gelu_tanh")
"""Of activations in the source."""


def activate_cpu(gate_up_T2F: jax.Array, activation: str) -> jax.Array:
    """See `gated_activation`."""
    num_rows, _, width = gate_up_T2F.shape
    out = jax.ShapeDtypeStruct((num_rows, width), jnp.float32)
    number = jnp.asarray(_NUMBERS.index(activation), jnp.int32)
    return jax.ffi.ffi_call(GATED_ACTIVATION, out)(gate_up_T2F, number)
