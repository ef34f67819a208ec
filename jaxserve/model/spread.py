"""How a model lies on a mesh: heads for every device, and where each parameter is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.model.parameters import ParameterInfo, layer_parameters
from jaxserve.model.stages import stages_of
from jaxserve.quantization.stacked import StackedWeight
from jaxserve.quantization.weight import QuantisedWeight, regrouped
from sharding import DATA, EXPERT, TENSOR, AnyMesh, num_shards, partition_spec, shard_size


def repeat_kv_heads(model: ModelConfig, num_devices: int) -> ModelConfig:
    """The model as so many devices have it that share out its attention.

    Where it has fewer KV heads than there are devices, each head is there several times, and each copy serves
    a part of the head's queries: numerically the same model.

    Raises ValueError, naming the sizes, if heads can be neither shared out nor repeated evenly.
    """
    heads, queries = model.num_kv_heads, model.queries_per_kv
    if heads % num_devices == 0:
        return model
    if num_devices % heads or queries % (num_devices // heads):
        raise ValueError(
            f"kv_heads has size {heads}, each with {queries} queries, which {num_devices} devices neither "
            "divide nor repeat evenly"
        )
    return dataclasses.replace(model, num_kv_heads=num_devices)


def experts_of_replica(model: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Experts that the devices of one replica have: their share, where the rest of the mesh cuts that as it
    would all of them, whole or in slices, or else all.

    `mesh`: the sizes of its axes.
    """
    share, rest = divmod(model.num_experts, mesh.get(DATA, 1))
    tensor, expert = mesh.get(TENSOR, 1), mesh.get(EXPERT, 1)
    sliced = share % expert == 0 and model.expert_intermediate_size % tensor == 0
    return share if rest == 0 and (share % (tensor * expert) == 0 or sliced) else model.num_experts


def shares_experts(config: EngineConfig) -> bool:
    """Whether no replica computes a layer of experts without the others."""
    return experts_of_replica(config.model, dict(config.mesh)) < config.model.num_experts


def cut_by(info: ParameterInfo, mesh: AnyMesh | None) -> ParameterInfo:
    """A parameter whose experts are cut as they can be: see the rules of `experts` and what follows them."""
    if "experts" not in info.axes:
        return info
    num_experts, width = (info.shape[info.axes.index(axis)] for axis in ("experts", "expert_mlp"))
    for experts, slices in (
        ("experts", "expert_mlp"),
        ("sliced_experts", "expert_slice"),
        ("own_experts", "expert_mlp"),
    ):
        if num_experts % num_shards(experts, mesh) == 0 and width % num_shards(slices, mesh) == 0:
            break
    else:
        experts, slices = "own_sliced_experts", "expert_slice"
    names = {"experts": experts, "expert_mlp": slices}
    axes = tuple(names.get(axis, axis) if axis is not None else None for axis in info.axes)
    return dataclasses.replace(info, axes=axes)


def weight_specs(entry: Any, info: ParameterInfo, mesh: AnyMesh | None) -> Any:
    """A tree of PartitionSpec in the form of one parameter, of a stack of them, or of a tuple.

    Args:
        entry: arrays or their shapes, quantised or not; of experts, inside a replica, those that it has.
        info: of one layer's.
        mesh: the devices.

    Raises ValueError, naming the axis and the sizes, where the mesh does not divide an array.
    """
    info = cut_by(_as_here(info, entry), mesh)
    if isinstance(entry, StackedWeight):
        # Inputs, one axis, are cut as the first of those that they were.
        outputs, inputs = info.axes[: -info.num_input_axes], info.first_input_axis
        axes = (inputs, *outputs) if entry.format.group else outputs
        return StackedWeight(
            _array_spec(entry.values, (*outputs, inputs), mesh),
            _array_spec(entry.scales, axes, mesh),
            None if entry.zeros is None else _array_spec(entry.zeros, axes, mesh),
            entry.format,
        )
    if not isinstance(entry, QuantisedWeight):
        return _array_specs(entry, info.axes, mesh)
    axes = info.scale_axes(grouped=entry.format.group > 0)
    return QuantisedWeight(
        _array_specs(entry.values, info.axes, mesh),
        _array_specs(entry.scales, axes, mesh),
        None if entry.zeros is None else _array_specs(entry.zeros, axes, mesh),
        entry.format,
    )


def _as_here(info: ParameterInfo, entry: Any) -> ParameterInfo:
    """A parameter with as many experts as there are of it."""
    if "experts" not in info.axes:
        return info
    axis, size = info.axes.index("experts"), list(info.shape)
    size[axis] = jax.tree.leaves(entry)[0].shape[axis - len(size)]
    return dataclasses.replace(info, shape=tuple(size))


def segment_specs(segments: Any, model: ModelConfig, mesh: AnyMesh) -> Any:
    """A tree of PartitionSpec in the form of the parameters of all layers.

    Args:
        segments: arrays or their shapes, as in `Params`.
        model: their model.
        mesh: the devices.
    """
    stage = stages_of(model, num_shards("stages", mesh)).model
    return tuple(
        tuple(
            {
                name: weight_specs(entries[name], info, mesh)
                for name, info in layer_parameters(model, kind).items()
            }
            for kind, entries in zip(segment.pattern, positions, strict=True)
        )
        for segment, positions in zip(stage.segments, segments, strict=True)
    )


def regrouped_for(weight: QuantisedWeight, info: ParameterInfo, mesh: AnyMesh | None) -> QuantisedWeight:
    """A quantised parameter, the scales of its groups repeated so that every device has those of its inputs.

    Raises ValueError where two numbers of a byte would lie on two devices.
    """
    if not weight.format.group:
        return weight
    num_parts = num_shards(cut_by(info, mesh).scale_axes(grouped=True)[-1], mesh)
    return weight if num_parts == 1 else regrouped(weight, num_parts)


def _array_specs(
    entry: Any, axes: tuple[str | None, ...], mesh: AnyMesh | None
) -> PartitionSpec | tuple[PartitionSpec, ...]:
    if isinstance(entry, tuple):
        return tuple(_array_spec(array, axes, mesh) for array in entry)
    return _array_spec(entry, axes, mesh)


def _array_spec(array: Any, axes: tuple[str | None, ...], mesh: AnyMesh | None) -> PartitionSpec:
    # Of a pipeline's layers the first axis begins with that of the stages.
    stacked = len(array.shape) - len(axes)
    for axis, size in zip(axes, array.shape[stacked:], strict=True):
        shard_size(axis, size, mesh)
    return partition_spec(("stages",) * stacked + axes, mesh)
