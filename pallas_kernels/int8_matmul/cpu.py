"""For CPU, in C++: `cpu.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native import INT8_MATMUL


def multiply_cpu(
    x_TI: jax.Array, w_LOI: jax.Array, layer: jax.Array, scale_T: jax.Array, scale_LO: jax.Array
) -> jax.Array:
    """See `int8_matmul`."""
    out = jax.ShapeDtypeStruct((x_TI.shape[0], w_LOI.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(INT8_MATMUL, out)(x_TI, w_LOI, layer, scale_T, scale_LO)
