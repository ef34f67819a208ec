"""Device meshes and the rules that map logical axes onto them."""

from sharding.per_shard import per_shard, shard_index, shard_sum
from sharding.rules import RULES, TENSOR, AnyMesh, named_sharding, num_shards, partition_spec, shard_size

__all__ = [
    "RULES",
    "TENSOR",
    "AnyMesh",
    "named_sharding",
    "num_shards",
    "partition_spec",
    "per_shard",
    "shard_index",
    "shard_size",
    "shard_sum",
]
