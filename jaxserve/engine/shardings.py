"""Where each array of the parameters and of the device state lies on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import ModelConfig
from jaxserve.engine.state import DeviceState
from jaxserve.model.cache import CACHE_AXES
from jaxserve.model.parameters import ParameterInfo, layer_parameters, model_parameters
from jaxserve.quantization.stacked import StackedWeight
from jaxserve.quantization.weight import QuantisedWeight
from sharding import AnyMesh, named_sharding, num_shards


def parameter_shardings(params: Mapping[str, Any], model: ModelConfig, mesh: AnyMesh) -> dict[str, Any]:
    """A tree of NamedSharding in the form of a parameter tree.

    Args:
        params: arrays or their shapes, as from `abstract_parameters`.
        model: their model.
        mesh: the devices to place them on.

    A stack over repetitions keeps its leading axis whole. Raises ValueError, naming the axis and the sizes,
    where the mesh does not divide an axis.
    """
    outer = {name: info for name, info in model_parameters(model) if not name.startswith("layers.")}
    tree: dict[str, Any] = {name: _place(params[name], info, mesh) for name, info in outer.items()}
    tree["segments"] = tuple(
        tuple(
            {name: _place(entries[name], info, mesh) for name, info in layer_parameters(model, kind).items()}
            for kind, entries in zip(segment.pattern, positions, strict=True)
        )
        for segment, positions in zip(model.segments, params["segments"], strict=True)
    )
    return tree


def state_shardings(state: DeviceState, mesh: AnyMesh) -> DeviceState:
    """A DeviceState of NamedSharding: pools and scales cut by KV heads, token counts by vocabulary.

    `state` holds arrays or their shapes. Raises ValueError where the mesh does not divide the pools.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda _: everywhere, state).replace(
        cache=jax.tree.map(lambda array: named_sharding(array.shape, CACHE_AXES, mesh), state.cache),
        # Read and written beside logits, which are cut by vocabulary: whole, it would double their memory.
        counts=named_sharding(state.counts.shape, (None, "vocab"), mesh),
    )


def _place(entry: Any, info: ParameterInfo, mesh: AnyMesh) -> Any:
    """The sharding of one parameter, of a stack of them, or of each of a tuple."""
    if isinstance(entry, StackedWeight):
        return _place_stack(entry, info, mesh)
    if not isinstance(entry, QuantisedWeight):
        return _place_array(entry, info.axes, mesh)
    grouped = entry.format.group > 0
    axes = info.scale_axes(grouped)
    if grouped and entry.scales.shape[-1] % num_shards(axes[-1], mesh):
        axes = (*axes[:-1], None)  # A device holds part of a group.
    return QuantisedWeight(
        _place_array(entry.values, info.axes, mesh),
        _place_array(entry.scales, axes, mesh),
        None if entry.zeros is None else _place_array(entry.zeros, axes, mesh),
        entry.format,
    )


def _place_stack(entry: StackedWeight, info: ParameterInfo, mesh: AnyMesh) -> StackedWeight:
    """Of all layers' matrices; their inputs, one axis, are cut as the first of those that they were."""
    first_input = len(info.axes) - info.num_input_axes
    outputs, inputs = info.axes[:first_input], info.axes[first_input]
    by_scale = (None, *outputs)
    if entry.format.group:
        # Unless a device holds part of a group.
        by_scale = (None, None if entry.scales.shape[1] % num_shards(inputs, mesh) else inputs, *outputs)
    return StackedWeight(
        named_sharding(entry.values.shape, (None, *outputs, inputs), mesh),
        named_sharding(entry.scales.shape, by_scale, mesh),
        None if entry.zeros is None else named_sharding(entry.zeros.shape, by_scale, mesh),
        entry.format,
    )


def _place_array(entry: Any, axes: tuple[str | None, ...], mesh: AnyMesh) -> Any:
    if isinstance(entry, tuple):
        return tuple(named_sharding(array.shape, axes, mesh) for array in entry)
    stacked = len(entry.shape) > len(axes)
    return named_sharding(entry.shape, (None, *axes) if stacked else axes, mesh)
