"""For CPU, in C++: `cpu.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.int8_matmul.reference import largest_integer
from pallas_kernels.native import INT8_MATMUL


def multiply_cpu(
    x_TI: jax.Array, w_LOI: jax.Array, layer: jax.Array, scale_T: jax.Array, scale_LO: jax.Array
) -> jax.Array:
    """See `int8_matmul`."""
    out = jax.ShapeDtypeStruct((x_TI.shape[0], w_LOI.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(INT8_MATMUL, out)(x_TI, w_LOI, layer, scale_T, scale_LO)


def round_and_multiply_cpu(
    x_TI: jax.Array, w_LOI: jax.Array, layer: jax.Array, scale_LO: jax.Array, *, row_bits: int
) -> jax.Array:
    """See `rounded_int8_matmul`."""
    num_rows, num_inputs = x_TI.shape
    largest = jnp.asarray(largest_integer(row_bits, num_inputs), jnp.int32)
    # What is worked with are results too, so that XLA finds the memory.
    results = (
        jax.ShapeDtypeStruct((num_rows, w_LOI.shape[1]), jnp.float32),
        jax.ShapeDtypeStruct(x_TI.shape, jnp.int8 if row_bits == 8 else jnp.int16),
        jax.ShapeDtypeStruct((num_rows,), jnp.float32),
    )
    operands = x_TI.astype(jnp.float32), w_LOI, layer, largest, scale_LO
    return jax.ffi.ffi_call(INT8_MATMUL, results)(*operands)[0]
