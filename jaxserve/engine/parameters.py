"""From a checkpoint's canonical arrays to the parameter tree on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import FloatFormat, ModelConfig
from jaxserve.model.parameters import EXPERT_NAMES, layer_parameters, model_parameters
from jaxserve.model.transformer import LayerLoop


def place_parameters(
    named: Iterable[tuple[str, np.ndarray | jax.Array]], model: ModelConfig, layer_loop: LayerLoop
) -> dict[str, Any]:
    """Put parameters on the default device as they arrive, holding one at a time on the host.

    Args:
        named: canonical names and arrays in the order of `model_parameters`.
        model: their model.
        layer_loop: which parameters become stacks over the repetitions of a segment.

    Returns the tree that `Transformer.forward` takes.
    """
    tree: dict[str, Any] = {}
    places = _layer_positions(model)
    segments: list[list[dict[str, Any]]] = [[{} for _ in segment.pattern] for segment in model.segments]
    for full_name, array in named:
        if not full_name.startswith("layers."):
            tree[full_name] = jnp.asarray(array)
            continue
        _, layer, name = full_name.split(".")
        segment, position, repetition = places[int(layer)]
        entries = segments[segment][position]
        if _is_stacked(name, model, int(layer), layer_loop):
            if name not in entries:
                count = model.segments[segment].count
                entries[name] = jnp.zeros((count, *array.shape), array.dtype)
            entries[name] = _set_repetition(entries[name], array, repetition)
        else:
            entries[name] = (*entries.get(name, ()), jnp.asarray(array))
    tree["segments"] = tuple(tuple(positions) for positions in segments)
    return tree


def abstract_parameters(
    model: ModelConfig, compute_format: FloatFormat, layer_loop: LayerLoop
) -> dict[str, Any]:
    """The shapes and types of the tree that `place_parameters` would return."""
    names: list[str] = []
    shapes: list[jax.ShapeDtypeStruct] = []
    for name, info in model_parameters(model):
        names.append(name)
        dtype = jnp.float32 if info.full_precision else jnp.dtype(compute_format)
        shapes.append(jax.ShapeDtypeStruct(info.shape, dtype))
    return jax.eval_shape(
        lambda arrays: place_parameters(zip(names, arrays, strict=True), model, layer_loop), shapes
    )


def _is_stacked(name: str, model: ModelConfig, layer: int, layer_loop: LayerLoop) -> bool:
    """Whether a parameter is one array over the repetitions of its segment."""
    info = layer_parameters(model, model.layers[layer])[name]
    return layer_loop == "stacked" or info.full_precision or name in EXPERT_NAMES


def _layer_positions(model: ModelConfig) -> list[tuple[int, int, int]]:
    """For each layer its segment, its position in the pattern, and its repetition."""
    return [
        (number, position, repetition)
        for number, segment in enumerate(model.segments)
        for repetition in range(segment.count)
        for position in range(len(segment.pattern))
    ]


@functools.partial(jax.jit, donate_argnums=0)
def _set_repetition(stack: jax.Array, array: jax.Array, repetition: int) -> jax.Array:
    """Write one repetition into its stack, in place."""
    return jax.lax.dynamic_update_index_in_dim(stack, array, repetition, 0)
