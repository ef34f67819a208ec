"""Quantised models against the float32 model of the very numbers that they store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import ModelConfig
from jaxserve.engine.build import resolve_config, resolve_dtype
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.parameters import abstract_parameters, place_parameters, quantised
from jaxserve.model.parameters import model_parameters
from jaxserve.model.transformer import LayerLoop
from jaxserve.quantization import Recipe, precision_of, recipe_named
from jaxserve.quantization.weight import QuantisedWeight
from jaxserve.weights import Checkpoint, open_checkpoint
from tests.engine.forward import PromptForward
from tests.oracle.cases import load_cases
from tests.oracle.tiny_models import TINY_MODELS, write_tiny_model
from tests.quantization.oracle import stored_numbers

# Every format that computes with the very numbers it stores, each somewhere in every model.
MIXED = Recipe(
    "mixed",
    1,
    (
        ("head", "fp8"),
        ("*.qkv", "int4-32"),
        ("*.o", "int8-weight-only"),
        ("*.gate_up", "fp8"),
        ("*.down", "int4-64-zeros"),
        ("*.expert_gate_up", "int4-32-zeros"),
        ("*", "int8-weight-only"),
    ),
)
QUANTISING = ("int8", "int8-weight-only", "fp8", "int4")
QUICK = ("llama_gqa_tied", "qwen2", "gemma3", "qwen3_moe_dense_layer")
"""Between them they have every kind of parameter."""
LOOPS: tuple[LayerLoop, ...] = ("switched", "stacked", "unrolled")


def checkpoint_of(name: str, folder: Path) -> Checkpoint:
    return open_checkpoint(write_tiny_model(name, folder))


def named(checkpoint: Checkpoint, recipe: Recipe) -> list[tuple[str, Any]]:
    return list(quantised(checkpoint.read("float32"), checkpoint.config, recipe, "float32"))


def widened(parameters: list[tuple[str, Any]], model: ModelConfig) -> list[tuple[str, Any]]:
    """The numbers that quantised parameters stand for, as float32 arrays."""
    infos = dict(model_parameters(model))
    return [
        (name, stored_numbers(array).astype(np.float32).reshape(infos[name].shape))
        if isinstance(array, QuantisedWeight)
        else (name, array)
        for name, array in parameters
    ]


def relative_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Of all logits, the root mean square of the differences over that of the logits."""
    a, b = np.concatenate(ours), np.concatenate(theirs)
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TINY_MODELS]
)
def test_every_family_computes_with_the_numbers_that_it_stores(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path / name)
    forward = PromptForward(checkpoint.config, [case.prompt_ids for case in load_cases(name).cases])
    # Rounded rows move the scores of experts too, and then which ones are chosen.
    for recipe, bound in (
        (MIXED, 1e-5),
        (recipe_named("int8"), 0.2 if "mix" in name or "moe" in name else 0.05),
    ):
        parameters = named(checkpoint, recipe)
        ours = forward.logits(place_parameters(parameters, checkpoint.config, "switched"))
        exact = widened(parameters, checkpoint.config)
        theirs = forward.logits(place_parameters(exact, checkpoint.config, "switched"))
        assert 0 < relative_difference(ours, theirs) < bound, recipe.name


@pytest.mark.parametrize("loop", LOOPS)
def test_every_recipe_computes_alike_however_the_layers_are_kept(loop: LayerLoop, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("qwen2", tmp_path / "model")
    model, prompts = checkpoint.config, [case.prompt_ids for case in load_cases("qwen2").cases]
    forward = PromptForward(model, prompts, loop)
    for name in QUANTISING:
        parameters = named(checkpoint, recipe_named(name))
        theirs = forward.logits(place_parameters(widened(parameters, model), model, loop))
        ours = forward.logits(place_parameters(parameters, model, loop))
        assert 0 < relative_difference(ours, theirs) < (0.05 if name == "int8" else 1e-5), name


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("recipe", QUANTISING)
def test_the_placed_tree_is_as_large_as_its_formats_say(recipe: str, loop: LayerLoop, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("qwen3_moe", tmp_path / "model")
    params = place_parameters(named(checkpoint, recipe_named(recipe)), checkpoint.config, loop)
    placed = sum(array.nbytes for array in jax.tree.leaves(params))
    assert placed == expected_bytes(checkpoint.config, recipe)
    abstract = abstract_parameters(checkpoint.config, "float32", loop, recipe_named(recipe))
    shapes = jax.tree.map(lambda array: (array.shape, array.dtype), params)
    assert shapes == jax.tree.map(lambda array: (array.shape, array.dtype), abstract)


def expected_bytes(model: ModelConfig, recipe: str) -> int:
    total = 0
    for name, info in model_parameters(model):
        size = int(np.prod(info.shape))
        format = None if info.full_precision else recipe_named(recipe).format_of(name)
        num_inputs = int(np.prod(info.shape[len(info.shape) - info.num_input_axes :]))
        total += 4 * size if format is None else format.num_bytes(size // num_inputs, num_inputs)
    return total


def test_a_recipe_that_only_names_a_type_is_that_type(tmp_path: Path) -> None:
    model = checkpoint_of("llama_gqa_tied", tmp_path / "model").config

    def precision(**settings: Any) -> str:
        options = EngineOptions(**settings)
        return precision_of(resolve_config(model, options, "cpu", resolve_dtype(options, "cpu"), 64))

    assert precision() == precision(quantize="f32") == "float32"
    assert precision(quantize="bf16") == precision(dtype="bfloat16") == "bfloat16"
    assert precision(quantize="int8") == "int8@2 float32"
    assert precision(quantize="int8", dtype="bfloat16") == "int8@2 bfloat16"
    with pytest.raises(ValueError, match="'bf16' computes in bfloat16, and dtype is 'float32'"):
        precision(quantize="bf16", dtype="float32")
    with pytest.raises(ValueError, match="quantize 'int3' is not one of f32, bf16, int8"):
        precision(quantize="int3")
