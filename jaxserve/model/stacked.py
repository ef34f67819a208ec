"""Rows times one of a stack of quantised matrices, on one device or on a mesh."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.model.parameters import ParameterInfo
from jaxserve.quantization.products import quantise_rows
from jaxserve.quantization.stacked import StackedWeight
from pallas_kernels.dispatch import Target
from pallas_kernels.quantised_matmul import pair_distance, quantised_matmul
from sharding import num_shards, per_shard, shard_sum


def stacked_product(
    x: jax.Array,
    weight: StackedWeight,
    layer: jax.Array | int,
    info: ParameterInfo,
    *,
    out_type: Any,
    mesh: Mesh | None,
    target: Target,
) -> jax.Array:
    """`[T, *out]`: x `[T, *in]` times a layer's matrix.

    Args:
        info: of the matrix, whose axes the mesh cuts; each device multiplies its part, and where inputs are
            cut the results are added up.
        out_type: of the result, which is float32 in spite of it where devices' results are added up.
        target: the device, for which a kernel is chosen.
    """
    row_scale_T = None
    x = x.reshape(x.shape[0], -1)
    if weight.format.row_bits:
        x, row_scale_T = quantise_rows(x, weight.format.row_bits)
    first_input = len(info.axes) - info.num_input_axes
    out_axes, in_axis = info.axes[:first_input], info.axes[first_input]
    shards = num_shards(in_axis, mesh)
    if shards > 1 and not _parts_stand_alone(weight, shards):
        # Parts of a group, or of what is packed together: the whole operation is cut up by the compiler.
        mesh, target = None, Target()
    if shards > 1:
        out_type = jnp.float32
    run = per_shard(
        functools.partial(_own_product, in_axis=in_axis, out_type=out_type, mesh=mesh, target=target),
        mesh,
        in_axes=(
            (None, in_axis),
            (None, *out_axes, in_axis),
            (None, in_axis, *out_axes) if weight.format.group else (None, *out_axes),
            (None, in_axis, *out_axes),
            (),
            (),
        ),
        out_axes=(None, *out_axes),
    )
    return run(x, weight.values, weight.scales, weight.zeros, jnp.asarray(layer, jnp.int32), row_scale_T)


def _parts_stand_alone(weight: StackedWeight, shards: int) -> bool:
    """Whether so many equal parts of the inputs are matrices of their own in the same form."""
    num_inputs = weight.num_inputs
    if weight.format.group and weight.scales.shape[1] % shards:
        return False
    if weight.format.storage != "uint4x2":
        return True
    return num_inputs % shards == 0 and pair_distance(num_inputs // shards) == pair_distance(num_inputs)


def _own_product(
    x_TI: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    layer: jax.Array,
    row_scale_T: jax.Array | None,
    *,
    in_axis: str | None,
    out_type: Any,
    mesh: Mesh | None,
    target: Target,
) -> jax.Array:
    """`[T, *out]` by what one device holds."""
    outputs = values.shape[1:-1]
    num_outputs = math.prod(outputs)
    grouped = scales.shape[1 : -len(outputs)]

    def joined(array: jax.Array) -> jax.Array:
        return array.reshape(array.shape[0], *grouped, num_outputs)

    out_TO = quantised_matmul(
        x_TI,
        values.reshape(values.shape[0], num_outputs, -1),
        joined(scales),
        None if zeros is None else joined(zeros),
        layer,
        row_scale_T=row_scale_T,
        out_type=out_type,
        target=target,
    )
    out = out_TO.reshape(-1, *outputs)
    return out if in_axis is None else shard_sum(out, in_axis, mesh)
