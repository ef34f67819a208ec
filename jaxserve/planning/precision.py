"""Precisions to plan with: a recipe's name, what its weights take, and what products of them cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxserve.config import FloatFormat, ModelConfig
from jaxserve.model.parameters import model_parameters
from jaxserve.model.stages import stages_of
from jaxserve.planning.meshes import ALONE, ChipMesh
from jaxserve.quantization import recipe_named


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One way to store and to multiply weights."""

    name: str
    weight_format: str
    """A name of `jaxserve.planning.footprint.WEIGHT_BYTES`: what a step reads."""
    compute_format: str
    """What products are as quick as."""
    recipe: str | None
    """A name of `jaxserve.quantization.RECIPES`; None for the floating-point formats."""

    def stored_bytes(self, model: ModelConfig, others: FloatFormat, mesh: ChipMesh = ALONE) -> float:
        """Of all of a model's parameters that a chip of a mesh has, scales included.

        A matrix is cut evenly, with the keys' and values' part of heads that are there several times, and
        layers with what is padding among those of a stage. Norms and routers are everywhere.

        `others`: the format of what a recipe leaves alone, norms, biases and routers aside.
        """
        stage = stages_of(model, mesh.pipe).model
        stage = replace(stage, num_kv_heads=max(model.num_kv_heads, mesh.tensor))
        recipe = recipe_named(self.recipe) if self.recipe else None
        plain = others if recipe else self.weight_format
        total = 0.0
        for name, info in model_parameters(stage):
            size, parts = math.prod(info.shape), mesh.num_parts(info.axes)
            format = recipe.format_of(name) if recipe and not info.full_precision else None
            if format is not None:
                num_inputs = math.prod(info.shape[-info.num_input_axes :])
                total += format.num_bytes(size // num_inputs, num_inputs) / parts
            else:
                total += size * (2 if plain == "bfloat16" and not info.full_precision else 4) / parts
        return total


_ALL = (
    Precision(name="float32", weight_format="float32", compute_format="float32", recipe=None),
    Precision(name="bfloat16", weight_format="bfloat16", compute_format="bfloat16", recipe=None),
    # Rows of twelve bits are two products of eight, which take as long as one of sixteen.
    Precision(name="int8", weight_format="int8", compute_format="bfloat16", recipe="int8"),
    Precision(name="w8a8", weight_format="int8", compute_format="int8", recipe="w8a8"),
    Precision(name="fp8", weight_format="float8", compute_format="bfloat16", recipe="fp8"),
    Precision(name="int4", weight_format="int4", compute_format="int4", recipe="int4"),
)

PRECISIONS: Mapping[str, Precision] = {one.name: one for one in _ALL}


def find_precision(name: str) -> Precision:
    """Raises ValueError, listing the names, for one that is not known."""
    if name not in PRECISIONS:
        raise ValueError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
