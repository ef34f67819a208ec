"""Which logical axes of an array are cut along which axes of the mesh.

Every array names its axes by what they count ("kv_heads", "vocab"); this table alone says which of them a
mesh divides. A name that it does not list, and a name whose mesh axes the mesh lacks, stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AnyMesh = Mesh | AbstractMesh
"""Of devices, or of nothing but sizes and names."""

DATA = "data"
"""The mesh axis along which whole sequences lie, with their pages: its devices have all weights each, but for
experts. What is said to one replica is said inside `per_replica`, whose mesh is without it."""
PIPE = "pipe"
"""The mesh axis along which whole layers lie, a run of them on each of its devices."""
TENSOR = "tensor"
"""The mesh axis along which the parts of one layer lie, those of attention included."""
EXPERT = "expert"
"""The mesh axis that cuts all but attention, which each of its devices has whole: for models with more
experts than KV heads."""

RULES: Mapping[str, tuple[str, ...]] = {
    # Runs of layers, of what has parts for all of them.
    "stages": (PIPE,),
    "kv_heads": (TENSOR,),
    "mlp": (EXPERT, TENSOR),
    # The first and the last product belong to no stage: each would keep the others waiting.
    "vocab": (PIPE, EXPERT, TENSOR),
    # Whole experts to a device: a slice of each one's width may be narrower than the hardware's tiles.
    # Replicas share them out, and send each other's experts their rows.
    "experts": (DATA, EXPERT, TENSOR),
    # Where there are too few for that.
    "sliced_experts": (DATA, EXPERT),
    "expert_slice": (TENSOR,),
    # Where replicas do not divide them: each has all.
    "own_experts": (EXPERT, TENSOR),
    "own_sliced_experts": (EXPERT,),
}
"""For each logical axis the mesh axes that cut it, the outermost first."""


def mesh_axes(axis: str | None, mesh: AnyMesh | None) -> tuple[str, ...]:
    """The axes that a mesh has of those that cut a logical axis."""
    if mesh is None or axis is None:
        return ()
    return tuple(name for name in RULES.get(axis, ()) if name in mesh.axis_names)


def num_shards(axis: str | None, mesh: AnyMesh | None) -> int:
    """Into how many parts a mesh cuts a logical axis; 1 without a mesh."""
    return math.prod(mesh.shape[name] for name in mesh_axes(axis, mesh)) if mesh is not None else 1


def shard_size(axis: str | None, size: int, mesh: AnyMesh | None) -> int:
    """The part of a logical axis of `size` that one device holds.

    Raises ValueError, naming the axis and both sizes, if the mesh does not divide it.
    """
    shards = num_shards(axis, mesh)
    if size % shards:
        along = " and ".join(map(repr, mesh_axes(axis, mesh)))
        raise ValueError(
            f"{axis} has size {size}, which the {shards} devices of mesh axis {along} do not divide"
        )
    return size // shards


def partition_spec(axes: Sequence[str | None], mesh: AnyMesh | None) -> PartitionSpec:
    """Where the mesh cuts an array whose axes have these logical names (None: no name, never cut)."""
    cuts = (mesh_axes(axis, mesh) for axis in axes)
    return PartitionSpec(*(cut[0] if len(cut) == 1 else cut or None for cut in cuts))


def named_sharding(shape: Sequence[int], axes: Sequence[str | None], mesh: AnyMesh) -> NamedSharding:
    """The sharding of an array of `shape` whose axes have these logical names.

    Raises ValueError if their numbers differ, or if the mesh does not divide an axis.
    """
    if len(shape) != len(axes):
        raise ValueError(f"an array of shape {tuple(shape)} with axes {tuple(axes)}")
    for axis, size in zip(axes, shape, strict=True):
        shard_size(axis, size, mesh)
    return NamedSharding(mesh, partition_spec(axes, mesh))
