"""Parameters on their way to a mesh: each array straight to its shards; a device gets its part alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import ModelConfig
from jaxserve.engine.shardings import weight_shardings
from jaxserve.model.parameters import ParameterInfo, model_parameters
from jaxserve.model.spread import regrouped_for
from jaxserve.model.stages import stages_of
from jaxserve.quantization.weight import QuantisedWeight
from sharding import named_sharding, num_shards, stage_mesh

Parameter = Any
"""A numpy or jax array, or a QuantisedWeight of such."""


def to_shards(
    named: Iterable[tuple[str, Parameter]], model: ModelConfig, mesh: Mesh | None
) -> Iterator[tuple[str, Parameter]]:
    """Parameters on the devices that hold them, as they arrive; what lies there already is not moved.

    Of one that lies on devices of other processes alone only shapes come, as ShapeDtypeStruct.

    Args:
        named: canonical names and parameters, as a checkpoint has them.
        model: as the mesh has it, which may have more KV heads.
        mesh: the devices; without one nothing is done. Of a pipeline a layer gets those of its stage.
    """
    if mesh is None:
        yield from named
        return
    infos = dict(model_parameters(model))
    for name, parameter in named:
        info, home = infos[name], _home(name, model, mesh)
        if home.local_devices:
            fitted = _fitted(name, parameter, info, home)
            yield name, jax.tree.map(_put, fitted, weight_shardings(fitted, info, home))
        else:
            yield name, jax.eval_shape(functools.partial(_fitted, name, info=info, mesh=home), parameter)


def is_elsewhere(parameter: Parameter) -> bool:
    """Whether `to_shards` has nothing but its shapes here."""
    return isinstance(jax.tree.leaves(parameter)[0], jax.ShapeDtypeStruct)


def own_region(
    name: str, shape: tuple[int, ...], model: ModelConfig, infos: Mapping[str, ParameterInfo], mesh: Mesh
) -> tuple[slice, ...] | None:
    """The part of a parameter that the devices of this process have of it; None for all.

    Args:
        name: of the parameter.
        shape: as the checkpoint has it.
        model: as the mesh has it.
        infos: of all its parameters.
        mesh: the devices.
    """
    info, home = infos[name], _home(name, model, mesh)
    if not home.local_devices:
        return (slice(0, 0),) * len(shape)
    if info.shape != shape:  # Heads are repeated, from all that there are.
        return None
    place = weight_shardings(jax.ShapeDtypeStruct(shape, np.float32), info, home)
    parts = [
        [range(size)[cut] for size, cut in zip(shape, index, strict=True)]
        for index in place.addressable_devices_indices_map(shape).values()
    ]
    region = tuple(
        slice(min(part.start for part in along), max(part.stop for part in along))
        for along in zip(*parts, strict=True)
    )
    whole = all(cut == slice(0, size) for cut, size in zip(region, shape, strict=True))
    return None if whole else region


def restored_place(
    model: ModelConfig, mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None], name: str
) -> NamedSharding:
    """Where an array of a checkpoint is restored to: its shards, or, cut as it will not stay, all devices
    that have a part of it."""
    home = _home(name, model, mesh)
    try:
        return named_sharding(shape, axes, home)
    except ValueError:
        return NamedSharding(home, PartitionSpec())


def _home(name: str, model: ModelConfig, mesh: Mesh) -> Mesh:
    """The devices that a parameter lies on: for a layer those of its stage."""
    num_stages = num_shards("stages", mesh)
    if num_stages == 1 or not name.startswith("layers."):
        return mesh
    stage, _ = stages_of(model, num_stages).place_of(int(name.split(".")[1]))
    return stage_mesh(mesh, stage)


def _fitted(name: str, parameter: Parameter, info: ParameterInfo, mesh: Mesh) -> Parameter:
    """A parameter as the mesh has it."""
    field = name.rpartition(".")[2]
    if field in ("qkv", "qkv_bias"):
        parameter = jax.tree.map(lambda array: _repeat_kv_heads(array, info.shape[0]), parameter)
    elif field == "o":
        parameter = _regroup_queries(parameter, info)
    if isinstance(parameter, QuantisedWeight):
        parameter = regrouped_for(parameter, info, mesh)
    return parameter


def _repeat_kv_heads(array: Any, num_heads: int) -> Any:
    """`[K, G + 2, ...]` with each KV head repeated to `num_heads` in all, its queries shared out."""
    repeats = num_heads // array.shape[0]
    if repeats == 1:
        return array
    queries = (array.shape[1] - 2) // repeats
    xp = np if isinstance(array, np.ndarray) else jnp
    return xp.concatenate(
        [
            array[:, :-2].reshape(num_heads, queries, *array.shape[2:]),
            xp.repeat(array[:, -2:], repeats, axis=0),
        ],
        axis=1,
    )


def _regroup_queries(parameter: Parameter, info: ParameterInfo) -> Parameter:
    """The output projection, whose inputs keep their order."""

    def regroup(values: Any) -> Any:
        return values.reshape(*info.shape[:3], values.shape[-1])

    if isinstance(parameter, QuantisedWeight):
        return dataclasses.replace(parameter, values=regroup(parameter.values))
    return regroup(parameter)


def _put(array: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(array, jax.Array):
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
