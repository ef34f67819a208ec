"""From a checkpoint's canonical arrays to the parameter tree on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import FloatFormat, ModelConfig
from jaxserve.engine.placement import to_shards
from jaxserve.engine.shardings import parameter_shardings, placed
from jaxserve.model.parameters import EXPERT_NAMES, ParameterInfo, layer_parameters, model_parameters
from jaxserve.model.spread import regrouped_for
from jaxserve.model.transformer import LayerLoop
from jaxserve.quantization import Recipe
from jaxserve.quantization.weight import QuantisedWeight, blank, quantise
from jaxserve.weights.quantised import StoredMatrix
from sharding import AnyMesh

Named = Iterable[tuple[str, np.ndarray | jax.Array | QuantisedWeight]]
"""Canonical names and parameters in the order of `model_parameters`."""


def quantised(
    named: Iterable[tuple[str, np.ndarray | jax.Array]],
    model: ModelConfig,
    recipe: Recipe,
    compute_format: FloatFormat,
) -> Iterator[tuple[str, np.ndarray | jax.Array | QuantisedWeight]]:
    """Parameters in the formats of a recipe, as they arrive.

    Args:
        named: canonical names and float32 arrays.
        model: their model.
        recipe: what has which format; norms, biases and routers stay float32.
        compute_format: of what the recipe leaves alone.
    """
    infos = dict(model_parameters(model))
    for name, array in named:
        info = infos[name]
        format = None if info.full_precision else recipe.format_of(name)
        if format is not None:
            yield name, quantise(array, format, info.num_input_axes)
        else:
            yield name, array if info.full_precision else array.astype(jnp.dtype(compute_format))


def as_weights(
    named: Iterable[tuple[str, np.ndarray | StoredMatrix]],
) -> Iterator[tuple[str, np.ndarray | QuantisedWeight]]:
    """Parameters as a checkpoint stores them, the quantised ones in the form that is computed with."""
    for name, array in named:
        if isinstance(array, StoredMatrix):
            yield name, QuantisedWeight(array.values, array.scales, array.zeros, array.format)
        else:
            yield name, array


def place_parameters(
    named: Named, model: ModelConfig, layer_loop: LayerLoop, mesh: Mesh | None = None
) -> dict[str, Any]:
    """Put parameters on their devices as they arrive, holding one at a time on the host.

    Args:
        named: the parameters.
        model: their model, as the mesh has it.
        layer_loop: which parameters become stacks over the repetitions of a segment.
        mesh: the devices; by default the first one.

    Returns the tree that `Transformer.forward` takes.
    """
    tree: dict[str, Any] = {}
    places = _layer_positions(model)
    segments: list[list[dict[str, Any]]] = [[{} for _ in segment.pattern] for segment in model.segments]
    for full_name, array in to_shards(named, model, mesh):
        if not full_name.startswith("layers."):
            tree[full_name] = jax.tree.map(jnp.asarray, array)
            continue
        _, layer, name = full_name.split(".")
        segment, position, repetition = places[int(layer)]
        entries, count = segments[segment][position], model.segments[segment].count
        stacked = _is_stacked(name, model, int(layer), layer_loop)
        entries[name] = _with_repetition(entries.get(name), array, repetition, count, stacked)
    tree["segments"] = tuple(tuple(positions) for positions in segments)
    return tree if mesh is None else jax.device_put(tree, parameter_shardings(tree, model, mesh))


def abstract_parameters(
    model: ModelConfig,
    compute_format: FloatFormat,
    layer_loop: LayerLoop,
    recipe: Recipe | None = None,
    mesh: AnyMesh | None = None,
) -> dict[str, Any]:
    """The shapes and types of the tree that `place_parameters` would return; a recipe quantises it.

    With a mesh they say where they lie. Raises ValueError, naming the axis and the sizes, where it does not
    divide an array.
    """

    def parameter(name: str, info: ParameterInfo) -> jax.Array | QuantisedWeight:
        format = recipe.format_of(name) if recipe and not info.full_precision else None
        if format is not None:
            return regrouped_for(blank(info.shape, format, info.num_input_axes), info, mesh)
        return jnp.zeros(info.shape, jnp.float32 if info.full_precision else jnp.dtype(compute_format))

    def place() -> dict[str, Any]:
        named = ((name, parameter(name, info)) for name, info in model_parameters(model))
        return place_parameters(named, model, layer_loop)

    shapes = jax.eval_shape(place)
    return shapes if mesh is None else placed(shapes, parameter_shardings(shapes, model, mesh))


def _with_repetition(entry: Any, array: Any, repetition: int, count: int, stacked: bool) -> Any:
    """A stack of `count`, or a tuple, with one more repetition; `entry` is None for the first."""
    if isinstance(array, QuantisedWeight):
        old = entry or QuantisedWeight(None, None, None, array.format)
        zeros = array.zeros
        return QuantisedWeight(
            _with_repetition(old.values, array.values, repetition, count, stacked),
            _with_repetition(old.scales, array.scales, repetition, count, stacked=True),
            None if zeros is None else _with_repetition(old.zeros, zeros, repetition, count, stacked=True),
            array.format,
        )
    if not stacked:
        return (*(entry or ()), jnp.asarray(array))
    if entry is None:
        entry = jnp.zeros((count, *array.shape), array.dtype, device=_stack_place(array))
    return _set_repetition(entry, array, repetition)


def _stack_place(array: Any) -> NamedSharding | None:
    """Where the stack of arrays belongs that are spread over devices as this one is."""
    place = getattr(array, "sharding", None)
    if not isinstance(place, NamedSharding) or place.mesh.empty or not isinstance(place.mesh, Mesh):
        return None
    return NamedSharding(place.mesh, PartitionSpec(None, *place.spec))


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
