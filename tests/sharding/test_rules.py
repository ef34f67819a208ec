"""The table of logical axes, against meshes that divide arrays and meshes that do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from sharding import num_shards, partition_spec, per_shard, shard_index, shard_size, shard_sum

EIGHT = AbstractMesh((8,), ("tensor",))


def test_a_listed_axis_is_cut_and_the_others_are_whole() -> None:
    assert partition_spec((None, "kv_heads", "hidden"), EIGHT) == PartitionSpec(None, "tensor", None)
    assert num_shards("kv_heads", EIGHT) == 8
    assert num_shards("hidden", EIGHT) == num_shards(None, EIGHT) == num_shards("kv_heads", None) == 1
    assert shard_size("vocab", 128256, EIGHT) == 16032


def test_a_mesh_without_the_axis_cuts_nothing() -> None:
    assert partition_spec(("vocab", "hidden"), AbstractMesh((4,), ("replica",))) == PartitionSpec(None, None)


def test_a_size_that_is_not_divided_is_named() -> None:
    with pytest.raises(ValueError, match="kv_heads has size 12, which the 8 devices of mesh axis 'tensor'"):
        shard_size("kv_heads", 12, EIGHT)


def test_one_source_serves_with_and_without_a_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))

    def run(mesh: Mesh | None) -> jax.Array:
        def own(x: jax.Array) -> jax.Array:
            return shard_sum(x + shard_index("vocab", mesh), "vocab", mesh)

        return per_shard(own, mesh, in_axes=(("vocab",),), out_axes=())(jnp.arange(4.0, dtype=jnp.float32))

    np.testing.assert_array_equal(run(None), run(mesh))
