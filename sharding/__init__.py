"""Device meshes and the rules that map logical axes onto them."""

from sharding.mesh import MeshAxes, make_mesh, mesh_name, mesh_size, parse_mesh
from sharding.per_shard import per_shard, shard_index, shard_sum
from sharding.rules import (
    EXPERT,
    RULES,
    TENSOR,
    AnyMesh,
    named_sharding,
    num_shards,
    partition_spec,
    shard_size,
)

__all__ = [
    "EXPERT",
    "RULES",
    "TENSOR",
    "AnyMesh",
    "MeshAxes",
    "make_mesh",
    "mesh_name",
    "mesh_size",
    "named_sharding",
    "num_shards",
    "parse_mesh",
    "partition_spec",
    "per_shard",
    "shard_index",
    "shard_size",
    "shard_sum",
]
