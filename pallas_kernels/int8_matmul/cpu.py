"""For CPU, in C++: `cpu.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native import INT8_MATMUL


def multiply_cpu(x_TI: jax.Array, w_OI: jax.Array, scale_T: jax.Array, scale_O: jax.Array) -> jax.Array:
    """See `int8_matmul`."""
    out = jax.ShapeDtypeStruct((x_TI.shape[0], w_OI.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(INT8_MATMUL, out)(x_TI, w_OI, scale_T, scale_O)
