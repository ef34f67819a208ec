"""A step spread over eight devices answers as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxserve.engine.parameters import abstract_parameters
from jaxserve.engine.shardings import parameter_shardings
from jaxserve.model.transformer import LayerLoop
from jaxserve.quantization import recipe_named
from tests.sharding.sharded_step import MODEL

REPOSITORY = Path(__file__).resolve().parents[2]
BOUNDS = {None: 2e-3, "int4": 2e-3, "int8": 0.02}
"""How far log-probabilities may part, by recipe, of keys and values in int8."""
EIGHT_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, "int8", "int4"])
def test_greedy_answers_are_the_same_on_eight_devices_and_on_one(recipe: str | None) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.sharding.sharded_step", *([recipe] if recipe else [])],
        cwd=REPOSITORY,
        env=os.environ | EIGHT_DEVICES,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    answers = json.loads(process.stdout)
    alone, spread = answers["alone"], answers["spread"]
    assert all(len(set(tokens)) > len(tokens) / 2 for tokens in alone["tokens"])
    for number, tokens in enumerate(alone["tokens"]):
        ours, theirs = spread["logprobs"][number], alone["logprobs"][number]
        pairs = zip(tokens, spread["tokens"][number], strict=True)
        parted = next((place for place, (one, other) in enumerate(pairs) if one != other), len(tokens))
        np.testing.assert_allclose(ours[:parted], theirs[:parted], atol=BOUNDS[recipe], rtol=0)
        # Sums over devices round otherwise, and then now and then the numbers that a row is rounded to.
        assert parted == len(tokens) or (
            recipe == "int8" and alone["margins"][number][parted] < 2 * BOUNDS[recipe]
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
        params = abstract_parameters(MODEL, "bfloat16", layer_loop, recipe_named(recipe))
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
    groups_axis = 1 if layer_loop == "stacked" else 2
    cut = PartitionSpec(*("tensor" if axis == groups_axis else None for axis in range(3)))
    assert by_group["segments"][0][0]["o"].scales.spec == cut
    # Two groups of 32 channels, of which a device has eight.
    assert by_group["segments"][0][0]["down"].scales.spec == PartitionSpec(None, None, None)


def test_a_mesh_that_does_not_divide_the_model_is_refused() -> None:
    mesh = AbstractMesh((5,), ("tensor",))
    with pytest.raises(ValueError, match="vocab has size 256, which the 5 devices"):
        parameter_shardings(abstract_parameters(MODEL, "bfloat16", "stacked"), MODEL, mesh)
