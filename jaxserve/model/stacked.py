"""Rows times one of a stack of quantised matrices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.quantization.stacked import StackedWeight
from pallas_kernels.dispatch import Target
from pallas_kernels.int8_matmul import quantise_rows
from pallas_kernels.quantised_matmul import quantised_matmul


def stacked_product(
    x: jax.Array,
    weight: StackedWeight,
    layer: jax.Array | int,
    *,
    out_type: Any,
    target: Target,
    bias: jax.Array | None = None,
) -> jax.Array:
    """`[T, *out]`: x `[T, *in]` times a layer's matrix, or the part of it that one device holds.

    Args:
        x: the rows.
        weight: the stack.
        layer: which matrix.
        out_type: of the result.
        target: the device, for which a kernel is chosen.
        bias: `[L, *out]`, what results are added to before they are rounded; None for nothing.
    """
    row_scale_T = None
    x_TI = x.reshape(x.shape[0], -1)
    if weight.format.row_bits:
        x_TI, row_scale_T = quantise_rows(x_TI, weight.format.row_bits)
    values, outputs = weight.values, weight.values.shape[1:-1]
    num_outputs = math.prod(outputs)

    def joined(array: jax.Array) -> jax.Array:
        # To join axes is to move what they hold: of the layer's own little, of all layers much in each.
        if len(outputs) > 1 and target.platform == "tpu":
            array = jax.lax.dynamic_index_in_dim(array, layer, 0)
        return array.reshape(*array.shape[: -len(outputs)], num_outputs)

    layer = jnp.asarray(layer, jnp.int32)
    out_TO = quantised_matmul(
        x_TI,
        values.reshape(values.shape[0], num_outputs, -1),
        joined(weight.scales),
        None if weight.zeros is None else joined(weight.zeros),
        layer,
        row_scale_T=row_scale_T,
        bias_LO=None if bias is None else joined(bias),
        out_type=out_type,
        target=target,
    )
    return out_TO.reshape(-1, *outputs)
