"""Which logical axes of an array are cut along which axes of the mesh.

Every array names its axes by what they count ("kv_heads", "vocab"); this table alone says which of them a
mesh divides. A name that it does not list, and a name whose mesh axis the mesh lacks, stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AnyMesh = Mesh | AbstractMesh
"""Of devices, or of nothing but sizes and names."""

TENSOR = "tensor"
"""The mesh axis along which the parts of one layer lie."""

RULES: Mapping[str, str] = {
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
    # Whole experts to a device: a slice of each one's width would be narrower than the hardware's tiles.
    "experts": TENSOR,
}


def num_shards(axis: str | None, mesh: AnyMesh | None) -> int:
    """Into how many parts a mesh cuts a logical axis; 1 without a mesh."""
    mesh_axis = _mesh_axis(axis, mesh)
    return 1 if mesh is None or mesh_axis is None else mesh.shape[mesh_axis]


def shard_size(axis: str | None, size: int, mesh: AnyMesh | None) -> int:
    """The part of a logical axis of `size` that one device holds.

    Raises ValueError, naming the axis and both sizes, if the mesh does not divide it.
    """
    shards = num_shards(axis, mesh)
    if size % shards:
        raise ValueError(
            f"{axis} has size {size}, which the {shards} devices of mesh axis {_mesh_axis(axis, mesh)!r} "
            "do not divide"
        )
    return size // shards


def partition_spec(axes: Sequence[str | None], mesh: AnyMesh | None) -> PartitionSpec:
    """Where the mesh cuts an array whose axes have these logical names (None: no name, never cut)."""
    return PartitionSpec(*(_mesh_axis(axis, mesh) for axis in axes))


def named_sharding(shape: Sequence[int], axes: Sequence[str | None], mesh: AnyMesh) -> NamedSharding:
    """The sharding of an array of `shape` whose axes have these logical names.

    Raises ValueError if their numbers differ, or if the mesh does not divide an axis.
    """
    if len(shape) != len(axes):
        raise ValueError(f"an array of shape {tuple(shape)} with axes {tuple(axes)}")
    for axis, size in zip(axes, shape, strict=True):
        shard_size(axis, size, mesh)
    return NamedSharding(mesh, partition_spec(axes, mesh))


def _mesh_axis(axis: str | None, mesh: AnyMesh | None) -> str | None:
    mesh_axis = RULES.get(axis) if axis is not None else None
    return mesh_axis if mesh is not None and mesh_axis in mesh.axis_names else None
