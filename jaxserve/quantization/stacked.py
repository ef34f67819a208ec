"""A stack of quantised matrices, one for each layer, as the kernels on accelerators read it.

Inputs are one axis, groups come before outputs (whose number fills a TPU's lanes, where that of groups would
leave most of them empty), and numbers of four bits are paired as `pack_nibbles` does.
"""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxserve.quantization.formats import WeightFormat
from jaxserve.quantization.weight import QuantisedWeight, unpack_nibbles
from pallas_kernels.quantised_matmul import pack_nibbles, pair_distance


@flax.struct.dataclass
class StackedWeight:
    """Matrices `[L, *out, inputs]`, each number `(value - zero) * scale`."""

    values: Any
    """`[L, *out, inputs]` in the format's storage; the last axis is half as long where a byte holds two."""
    scales: Any
    """`[L, *out]` for channels, `[L, groups, *out]` for groups of inputs."""
    zeros: Any
    """In the form of `scales`, or None for a symmetric format."""
    format: WeightFormat = flax.struct.field(pytree_node=False)

    @property
    def num_inputs(self) -> int:
        return self.values.shape[-1] * (2 if self.format.storage == "uint4x2" else 1)


def fits_stack(parameter: Any, num_parts: int = 1) -> bool:
    """Whether it is a quantised matrix that the kernels have a form for: without minima, which are added, and
    with scales in a type that a TPU has.

    `num_parts`: of its inputs, each on a device of its own, where it must be a matrix in the same form.
    """
    if not isinstance(parameter, QuantisedWeight):
        return False
    if parameter.format.minima or parameter.format.scale_type == "float16":
        return False
    if parameter.format.storage != "uint4x2" or num_parts == 1:
        return True
    num_outputs = parameter.scales.ndim - (parameter.format.group > 0)
    num_inputs = 2 * math.prod(parameter.values.shape[num_outputs:])
    return num_inputs % num_parts == 0 and pair_distance(num_inputs // num_parts) == pair_distance(num_inputs)


def stack_of_one(weight: QuantisedWeight) -> StackedWeight | None:
    """A matrix `[*out, *in]` as a stack `[1, *out, inputs]`, where that moves nothing but scales of groups.

    None for what a stack has another form for, or none: numbers of four bits, minima, scales in float16.
    """
    if weight.format.storage == "uint4x2" or not fits_stack(weight):
        return None
    return jax.tree.map(lambda array: array[None], for_stack(weight))


@jax.jit
def for_stack(weight: QuantisedWeight) -> StackedWeight:
    """One layer's matrix `[*out, *in]` in the form of a stack, without the stack's first axis."""
    grouped = weight.format.group > 0
    num_outputs = weight.scales.ndim - grouped

    def groups_first(array: Any) -> Any:
        return jnp.moveaxis(array, -1, 0) if grouped and array is not None else array

    values = weight.values.reshape(*weight.values.shape[:num_outputs], -1)
    if weight.format.storage == "uint4x2":
        values = pack_nibbles(unpack_nibbles(values))
    return StackedWeight(values, groups_first(weight.scales), groups_first(weight.zeros), weight.format)
