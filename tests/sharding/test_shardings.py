"""Where parameters lie on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.engine.parameters import abstract_parameters
from jaxserve.engine.shardings import parameter_shardings
from jaxserve.model.spread import experts_of_replica
from jaxserve.model.transformer import LayerLoop
from jaxserve.quantization import recipe_named

WINDOWED, FULL, EXPERTS = LayerKind(window=12), LayerKind(), LayerKind(experts=True)
MODEL = ModelConfig(
    family="tiny",
    vocab_size=256,
    hidden_size=48,
    intermediate_size=64,
    num_heads=16,
    num_kv_heads=8,
    head_size=16,
    layers=(WINDOWED, FULL) * 2 + (EXPERTS,) * 2,
    max_position=256,
    qk_norm=True,
    qkv_bias=True,
    num_experts=16,
    experts_per_token=3,
    expert_intermediate_size=24,
    tie_embeddings=False,
)


@pytest.mark.parametrize("layer_loop", ["stacked", "unrolled"])
def test_every_matrix_is_cut_and_a_stack_keeps_its_first_axis(layer_loop: LayerLoop) -> None:
    mesh = AbstractMesh((8,), ("tensor",))
    shardings = parameter_shardings(abstract_parameters(MODEL, "bfloat16", layer_loop), MODEL, mesh)
    assert shardings["head"].spec == PartitionSpec("tensor", None)
    dense, experts = shardings["segments"][0][0], shardings["segments"][1][0]
    o = PartitionSpec(None, "tensor", None, None)
    if layer_loop == "stacked":
        assert dense["o"].spec == PartitionSpec(None, *o)
    else:
        assert [sharding.spec for sharding in dense["o"]] == [o, o]
    assert dense["attn_norm"].spec == PartitionSpec(None, None)
    assert experts["expert_down"].spec == PartitionSpec(None, "tensor", None, None)
    assert experts["router"].spec == PartitionSpec(None, None, None)


@pytest.mark.parametrize("layer_loop", ["stacked", "unrolled"])
def test_scales_are_cut_as_the_outputs_and_groups_that_they_belong_to(layer_loop: LayerLoop) -> None:
    mesh = AbstractMesh((8,), ("tensor",))

    def shardings(recipe: str) -> Any:
        params = abstract_parameters(MODEL, "bfloat16", layer_loop, recipe_named(recipe), mesh)
        return parameter_shardings(params, MODEL, mesh)

    by_channel, by_group = shardings("int8"), shardings("int4")
    assert by_channel["head"].scales.spec == PartitionSpec("tensor")
    dense, experts = by_channel["segments"][0][0], by_channel["segments"][1][0]
    assert dense["qkv"].scales.spec == PartitionSpec(None, "tensor", None, None)
    assert dense["down"].scales.spec == PartitionSpec(None, None)
    assert experts["expert_gate_up"].scales.spec == PartitionSpec(None, "tensor", None, None)
    matrix = PartitionSpec("tensor", None, None, None)
    values = dense["qkv"].values
    if layer_loop == "stacked":
        assert values.spec == PartitionSpec(None, *matrix)
    else:
        assert [sharding.spec for sharding in values] == [matrix, matrix]
    # Sixteen heads of 16 and groups of 32: one group for the two query heads of a KV head.
    # A byte of its rows would have two numbers of two devices in the kernels' stack, where groups come first.
    assert by_group["segments"][0][0]["o"].scales.spec == PartitionSpec(None, None, "tensor")
    # Two groups of 32 channels, of which a device has eight: their scales are there four times.
    # Four bits are a stack where matrices lie apart, too.
    assert by_group["segments"][0][0]["down"].scales.spec == PartitionSpec(None, "tensor", None)


@pytest.mark.parametrize(
    ("num_experts", "sizes", "spec"),
    [
        (16, (2, 4), (("data", "tensor"), None, None)),
        (4, (2, 4), ("data", None, "tensor")),  # Two for each replica, which has slices of them.
        (6, (4, 2), ("tensor", None, None)),  # Each has all.
        (6, (4, 4), (None, None, "tensor")),
    ],
)
def test_replicas_share_out_experts_where_they_divide_them(
    num_experts: int, sizes: tuple[int, int], spec: tuple[Any, ...]
) -> None:
    model = dataclasses.replace(MODEL, num_experts=num_experts)
    mesh = AbstractMesh(sizes, ("data", "tensor"))
    shardings = parameter_shardings(abstract_parameters(model, "bfloat16", "stacked"), model, mesh)
    dense, experts = shardings["segments"][0][0], shardings["segments"][1][0]
    assert experts["expert_down"].spec == PartitionSpec(None, *spec)
    assert "data" not in dense["down"].spec
    share = num_experts // sizes[0] if "data" in str(spec) else num_experts
    assert experts_of_replica(model, dict(mesh.shape)) == share


def test_a_mesh_that_does_not_divide_the_model_is_refused() -> None:
    mesh = AbstractMesh((5,), ("tensor",))
    with pytest.raises(ValueError, match="vocab has size 256, which the 5 devices"):
        parameter_shardings(abstract_parameters(MODEL, "bfloat16", "stacked"), MODEL, mesh)
