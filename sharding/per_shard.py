"""Functions that each device of a mesh runs on its own part of the arrays, and what they say to each other.

All of these do nothing without a mesh, so that one source serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sharding.rules import RULES, num_shards, partition_spec

Function = TypeVar("Function", bound=Callable)
Axes = Sequence[str | None]
"""Logical axes of an array, or of every array of a tree; empty for whole arrays."""


def per_shard(function: Function, mesh: Mesh | None, *, in_axes: Sequence[Axes], out_axes: Axes) -> Function:
    """`function`, run by every device on the parts of its arguments that the rules give it.

    Args:
        function: takes arrays, or trees of them, by position.
        mesh: the devices; without one the function is returned as it is.
        in_axes: for each argument its logical axes.
        out_axes: those of the result.
    """
    if mesh is None:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(partition_spec(axes, mesh) for axes in in_axes),
        out_specs=partition_spec(out_axes, mesh),
        check_vma=False,
    )


def shard_index(axis: str, mesh: Mesh | None) -> jax.Array | int:
    """Inside `per_shard`, which part of a logical axis this device holds."""
    return 0 if num_shards(axis, mesh) == 1 else jax.lax.axis_index(RULES[axis]).astype(jnp.int32)


def shard_sum(x: jax.Array, axis: str, mesh: Mesh | None) -> jax.Array:
    """Inside `per_shard`, the sum of x over the devices that share out a logical axis."""
    return x if num_shards(axis, mesh) == 1 else jax.lax.psum(x, RULES[axis])
