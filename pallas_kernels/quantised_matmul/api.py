"""The operation's one entry: checks shapes at trace time, then picks an implementation.

A bias is added inside: otherwise the kernel writes float32 for XLA to add it to, of 2,048 rows of an 8B
model's q, k and v on v6e 50 MB out and in where 25 MB do. The residual sum is not: XLA adds it where
it reads the sum for the next norm, with 8 rows in vector memory alone; with 2,048 a kernel would read the
residual and write the sum, as many bytes of main memory as now, where it writes the product and the sum stays
on the chip.
On GPU the bias is XLA's to add.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Target, choose
from pallas_kernels.quantised_matmul.gpu import multiply_gpu
from pallas_kernels.quantised_matmul.gpu import obstacle as gpu_obstacle
from pallas_kernels.quantised_matmul.gpu import outdone as gpu_outdone
from pallas_kernels.quantised_matmul.reference import multiply_reference
from pallas_kernels.quantised_matmul.tpu import multiply_tpu, obstacle

IMPLEMENTATIONS = (
    Implementation(
        "tpu", "tpu", multiply_tpu, obstacle, evidence="benchmarks/results/tpu-schedule-matmul.json"
    ),
    Implementation("gpu", "gpu", multiply_gpu, gpu_obstacle, gpu_outdone),
    Implementation("reference", None, multiply_reference),
)
VALUE_TYPES = ("int8", "float8_e4m3fn", "uint8")


def quantised_matmul(
    x_TI: jax.Array,
    values_LOI: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    layer: jax.Array | int,
    *,
    row_scale_T: jax.Array | None = None,
    bias_LO: jax.Array | None = None,
    out_type: Any = jnp.float32,
    target: Target | None = None,
) -> jax.Array:
    """`[T, O]`: rows times one matrix of a stack, each number of which is `(value - zero) * scale`.

    Args:
        x_TI: the rows: floating point, or with a scale for each integers (`int8_matmul`) or float8_e4m3fn.
        values_LOI: int8, float8_e4m3fn, or uint8 `[L, O, I / 2]` of two numbers each, as `pack_nibbles` does.
        scales: `[L, O]` for channels, `[L, groups, O]` for groups of inputs; or the layer's own, L being 1.
        zeros: integers in the form of `scales`; None for 0, or 8 for numbers of four bits.
        layer: which matrix.
        row_scale_T: float32, of rows of integers or of float8_e4m3fn.
        bias_LO: what each matrix's outputs are added to, before the result is rounded; or the layer's own.
        out_type: of the result, which is rounded to it once, from float32.
        target: the device to trace for; None for any, which takes the reference.

    Sums are float32, and of integers exact. The reference rounds a matrix with scales for groups to the type
    of x; the kernels may scale the sums of its groups instead, which rounds less.

    Raises ValueError at trace time on shapes and types that disagree.
    """
    _check(x_TI, values_LOI, scales, zeros, row_scale_T)
    if bias_LO is not None and bias_LO.shape not in (values_LOI.shape[:2], (1, values_LOI.shape[1])):
        raise ValueError(f"biases {bias_LO.shape} of a stack {values_LOI.shape}: [L, O]")
    target = target or Target()
    chosen, interpret = choose(
        "quantised_matmul",
        IMPLEMENTATIONS,
        target,
        rows=(x_TI.shape, jnp.dtype(x_TI.dtype).name),
        values=(values_LOI.shape, jnp.dtype(values_LOI.dtype).name),
        num_groups=scales.shape[1] if scales.ndim == 3 else 0,
        has_zeros=zeros is not None,
        capability=target.capability if target.platform == "gpu" else None,
    )
    return chosen.run(
        x_TI,
        values_LOI,
        scales,
        zeros,
        layer,
        row_scale_T,
        bias_LO=bias_LO,
        out_type=out_type,
        target=target,
        interpret=interpret,
    )


def _check(
    x_TI: jax.Array,
    values_LOI: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    row_scale_T: jax.Array | None,
) -> None:
    if values_LOI.dtype.name not in VALUE_TYPES:
        raise ValueError(f"a matrix of {values_LOI.dtype}: choose from {', '.join(VALUE_TYPES)}")
    packing = 2 if values_LOI.dtype == jnp.uint8 else 1
    if x_TI.ndim != 2 or values_LOI.ndim != 3 or x_TI.shape[1] != values_LOI.shape[2] * packing:
        raise ValueError(
            f"rows {x_TI.shape} times a stack {values_LOI.shape} with {packing} numbers in a value: the last "
            "axes must agree"
        )
    layers = 1, values_LOI.shape[0]
    if scales.ndim not in (2, 3) or scales.shape[0] not in layers or scales.shape[-1] != values_LOI.shape[1]:
        raise ValueError(
            f"scales {scales.shape} of a stack {values_LOI.shape}: [L, O] or [L, groups, O], L or 1 of them"
        )
    if scales.ndim == 3 and x_TI.shape[1] % scales.shape[1]:
        raise ValueError(f"{scales.shape[1]} groups of {x_TI.shape[1]} inputs")
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros {zeros.shape} beside scales {scales.shape}")
    wanted = jnp.int8 if jnp.issubdtype(x_TI.dtype, jnp.integer) else x_TI.dtype
    if jnp.issubdtype(x_TI.dtype, jnp.floating) and x_TI.dtype != jnp.float8_e4m3fn:
        if row_scale_T is not None:
            raise ValueError(f"rows of {x_TI.dtype} have no scales of their own")
        return
    if row_scale_T is None or row_scale_T.shape != x_TI.shape[:1]:
        of = None if row_scale_T is None else row_scale_T.shape
        raise ValueError(f"rows {x_TI.shape} of {x_TI.dtype} want a scale each, not {of}")
    if scales.ndim == 3 or zeros is not None or values_LOI.dtype != wanted:
        raise ValueError(
            f"rows of {x_TI.dtype} want a matrix of {jnp.dtype(wanted)} with a scale a channel, not "
            f"{values_LOI.dtype} with scales {scales.shape}{'' if zeros is None else ' and zeros'}"
        )
