"""For CPU, in C++ (`cpu.cc`): one pass, where XLA makes half a dozen, one of them a product by ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native import RMS_NORM


def norm_cpu(x: jax.Array, weight_D: jax.Array, eps: float, *, exact_order: bool) -> jax.Array:
    """See `rms_norm`. A row's sum hangs on the row alone, whatever `exact_order`."""
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return jax.ffi.ffi_call(RMS_NORM, out)(x, *_others(weight_D, eps))


def add_and_norm_cpu(
    x: jax.Array, y: jax.Array, weight_D: jax.Array, eps: float, *, exact_order: bool
) -> tuple[jax.Array, jax.Array]:
    """See `add_and_rms_norm`."""
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    total, normed = jax.ffi.ffi_call(RMS_NORM, (out, out))(x, *_others(weight_D, eps), y)
    return total, normed


def _others(weight_D: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    return weight_D.astype(jnp.float32), jnp.asarray(eps, jnp.float32)
