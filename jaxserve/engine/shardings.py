"""Where each array of the parameters and of the device state lies on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import ModelConfig
from jaxserve.engine.replicas import shardings_of_all
from jaxserve.engine.state import DeviceState
from jaxserve.model.cache import CACHE_AXES, Cache
from jaxserve.model.parameters import ParameterInfo, model_parameters
from jaxserve.model.pipeline import HANDED_AXES
from jaxserve.model.spread import segment_specs, weight_specs
from sharding import DATA, AnyMesh, named_sharding


def parameter_shardings(params: Mapping[str, Any], model: ModelConfig, mesh: AnyMesh) -> dict[str, Any]:
    """A tree of NamedSharding in the form of a parameter tree.

    Args:
        params: arrays or their shapes, as from `abstract_parameters`.
        model: their model.
        mesh: the devices to place them on.

    A stack over repetitions keeps its leading axis whole, but for what stages have of it.
    """
    outer = {name: info for name, info in model_parameters(model) if not name.startswith("layers.")}
    tree: dict[str, Any] = {name: weight_shardings(params[name], info, mesh) for name, info in outer.items()}
    tree["segments"] = segment_shardings(params["segments"], model, mesh)
    return tree


def segment_shardings(segments: Any, model: ModelConfig, mesh: AnyMesh) -> Any:
    """Of all layers; see `segment_specs`."""
    return _on(segment_specs(segments, model, mesh), mesh)


def weight_shardings(entry: Any, info: ParameterInfo, mesh: AnyMesh) -> Any:
    """The NamedSharding of one parameter, or of each of its arrays; see `weight_specs`."""
    return _on(weight_specs(entry, info, mesh), mesh)


def _on(specs: Any, mesh: AnyMesh) -> Any:
    """A tree of NamedSharding from one of PartitionSpec."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def state_shardings(state: DeviceState, mesh: AnyMesh) -> DeviceState:
    """A DeviceState of NamedSharding: pools and scales cut by KV heads, token counts by vocabulary, all of it
    by replicas.

    `state` holds one replica's arrays or their shapes. Raises ValueError where the mesh does not divide the
    pools.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    places: Any = jax.tree.map(lambda _: whole, state)
    if state.ticks is not None:
        handed = named_sharding(state.ticks.handed_NSD.shape, HANDED_AXES, mesh)
        places = places.replace(ticks=places.ticks.replace(handed_NSD=handed))
    places = places.replace(
        cache=cache_shardings(state.cache, mesh),
        # Read and written beside logits, which are cut by vocabulary: whole, it would double their memory.
        counts=named_sharding(state.counts.shape, (None, "vocab"), mesh),
    )
    return shardings_of_all(places, mesh) if DATA in mesh.axis_names else places


def cache_shardings(cache: Cache, mesh: AnyMesh) -> Any:
    """Of pools and their scales, in the form of the cache."""
    return jax.tree.map(lambda array: named_sharding(array.shape, CACHE_AXES, mesh), cache)


def placed(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes with the shardings of another."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def everywhere(tree: Any, mesh: AnyMesh | None) -> Any:
    """Shapes of a tree's arrays, whole on every device; without a mesh the tree itself."""
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole), tree)


def shardings_of(tree: Any) -> Any:
    """Where the arrays of a tree lie."""
    return jax.tree.map(lambda array: array.sharding, tree)
