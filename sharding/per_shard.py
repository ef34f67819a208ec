"""Functions that each device of a mesh runs on its own part of the arrays, and what they say to each other.

All of these do nothing without a mesh, so that one source serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import DATA, mesh_axes, named_sharding, num_shards, partition_spec

Function = TypeVar("Function", bound=Callable)
Axes = Any
"""Logical axes of an array, or of every array of a tree, as a tuple of names and None; empty for whole ones.
Or a tuple or dictionary of such, or a tree of PartitionSpec."""


def per_shard(function: Function, mesh: Mesh | None, *, in_axes: Sequence[Axes], out_axes: Axes) -> Function:
    """`function`, run by every device on the parts of its arguments that the rules give it.

    Args:
        function: takes arrays, or trees of them, by position, and closes over none.
        mesh: the devices; without one the function is returned as it is.
        in_axes: for each argument its logical axes.
        out_axes: those of the result.
    """
    if mesh is None:
        return function
    around, specs = jax.sharding.get_abstract_mesh(), tuple(_specs(axes, mesh) for axes in in_axes)
    own = set(mesh.axis_names) - set(around.manual_axes)  # All but that of replicas, inside one.
    return jax.shard_map(
        function,
        mesh=around if around.manual_axes else mesh,
        in_specs=specs,
        out_specs=_specs(out_axes, mesh),
        axis_names=own,
        check_vma=False,
    )


def per_replica(function: Function, mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Function:
    """`function`, run by the devices of every replica on its part of the arguments; on the other axes of the
    mesh they lie as before.

    Args:
        function: takes arrays, or trees of them, by position.
        mesh: has replicas.
        in_specs: for each argument a PartitionSpec that cuts it along the axis of replicas or not at all, or
            a tree of such.
        out_specs: of the result.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={DATA}, check_vma=False
    )


def from_all_replicas(x: jax.Array) -> jax.Array:
    """Inside `per_replica`, the x of all replicas, one after another along the first axis."""
    return jax.lax.all_gather(x, DATA, tiled=True)


def sum_to_replicas(x: jax.Array) -> jax.Array:
    """Inside `per_replica`, of an x that has a part for each replica along the first axis, this one's, summed
    over all."""
    return jax.lax.psum_scatter(x, DATA, tiled=True)


def most_of_replicas(x: jax.Array) -> jax.Array:
    """Inside `per_replica`, the largest x of all replicas."""
    return jax.lax.pmax(x, DATA)


def replica_index() -> jax.Array:
    """Inside `per_replica`, which one this is."""
    return jax.lax.axis_index(DATA).astype(jnp.int32)


def constrained(x: jax.Array, axes: Sequence[str | None], mesh: Mesh | None) -> jax.Array:
    """x, to be cut by the partitioner as the rules say; outside `per_shard`."""
    if mesh is None:
        return x
    around = jax.sharding.get_abstract_mesh()
    place = named_sharding(x.shape, axes, mesh)
    if around.manual_axes:
        place = NamedSharding(around, place.spec)
    return jax.lax.with_sharding_constraint(x, place)


def inside_shard(mesh: Mesh | None) -> bool:
    """Whether this is traced inside `per_shard`, where arrays are one device's parts already."""
    return mesh is not None and set(mesh.axis_names) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def shard_index(axis: str, mesh: Mesh | None) -> jax.Array | int:
    """Inside `per_shard`, which part of a logical axis this device holds."""
    if num_shards(axis, mesh) == 1:
        return 0
    return jax.lax.axis_index(mesh_axes(axis, mesh)).astype(jnp.int32)


def shard_sum(x: jax.Array, axis: str, mesh: Mesh | None) -> jax.Array:
    """Inside `per_shard`, the sum of x over the devices that share out a logical axis."""
    return x if num_shards(axis, mesh) == 1 else jax.lax.psum(x, mesh_axes(axis, mesh))


def from_shard_before(x: jax.Array, axis: str, mesh: Mesh) -> jax.Array:
    """Inside `per_shard`, the x of the device before this one along a logical axis; zeros on the first."""
    pairs = [(number, number + 1) for number in range(num_shards(axis, mesh) - 1)]
    return jax.lax.ppermute(x, mesh_axes(axis, mesh), pairs)


def _specs(axes: Axes, mesh: Mesh) -> Any:
    if isinstance(axes, PartitionSpec):
        return axes
    if isinstance(axes, tuple):
        if all(name is None or isinstance(name, str) for name in axes):
            return partition_spec(axes, mesh)
        return tuple(_specs(part, mesh) for part in axes)
    if isinstance(axes, Mapping):
        return {name: _specs(part, mesh) for name, part in axes.items()}
    return axes
