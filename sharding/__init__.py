"""Device meshes and the rules that map logical axes onto them."""

from sharding.mesh import MeshAxes, make_mesh, mesh_name, mesh_size, parse_mesh, replica_mesh, stage_mesh
from sharding.per_shard import (
    constrained,
    from_shard_before,
    inside_shard,
    per_replica,
    per_shard,
    shard_index,
    shard_sum,
)
from sharding.rules import (
    DATA,
    EXPERT,
    PIPE,
    RULES,
    TENSOR,
    AnyMesh,
    named_sharding,
    num_shards,
    partition_spec,
    shard_size,
)

__all__ = [
    "DATA",
    "EXPERT",
    "PIPE",
    "RULES",
    "TENSOR",
    "AnyMesh",
    "MeshAxes",
    "constrained",
    "from_shard_before",
    "inside_shard",
    "make_mesh",
    "mesh_name",
    "mesh_size",
    "named_sharding",
    "num_shards",
    "parse_mesh",
    "partition_spec",
    "per_replica",
    "per_shard",
    "replica_mesh",
    "shard_index",
    "shard_size",
    "shard_sum",
    "stage_mesh",
]
