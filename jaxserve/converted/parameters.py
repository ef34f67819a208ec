"""A model's parameters to and from Orbax checkpoints (OCDBT), each restored straight to where it belongs.

A checkpoint holds a group of parameters, so that writing needs the memory of one group. Those of a name that
are alike in all layers are one array in it: the number of arrays takes time to restore, more than their size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding

from jaxserve.config import FloatFormat
from jaxserve.model.parameters import ParameterInfo, model_parameters
from jaxserve.quantization import WeightFormat, recipe_of_label
from jaxserve.quantization.weight import QuantisedWeight, blank
from jaxserve.weights.converted import ConvertedCheckpoint, group_folder

Parameter = np.ndarray | jax.Array | QuantisedWeight
_Arrays = dict[str, Any]
"""The arrays of a parameter, or their shapes and types: `values`, and `scales` and `zeros` if it has them."""
GROUP_BYTES = 2**30
"""At which a checkpoint is closed and the next one begun."""
_CHUNKS = ocp.SaveArgs(chunk_byte_size=2**22)
"""What is read as a whole: of a large matrix, devices mostly find their parts in chunks of their own."""


class Place(Protocol):
    """Says where an array of a parameter belongs."""

    def __call__(self, shape: Sequence[int], axes: Sequence[str | None]) -> Sharding:
        """`axes`: logical names, see `ParameterInfo`."""
        ...


def save_parameters(
    named: Iterable[tuple[str, Parameter]], folder: Path, group_bytes: int = GROUP_BYTES
) -> tuple[tuple[str, ...], ...]:
    """Write parameters in the order in which they come; returns the names in each checkpoint."""
    groups: list[tuple[str, ...]] = []
    group: dict[str, _Arrays] = {}
    size = 0
    # Compressed, quantised weights are a fifth smaller and take three times as long to read.
    with ocp.PyTreeCheckpointer(use_compression=False) as checkpointer:

        def write() -> None:
            target = group_folder(folder, len(groups)).absolute()
            stacks = {
                stack: {
                    part: np.stack([np.asarray(group[name][part]) for name in names])
                    for part in group[names[0]]
                }
                for stack, names in _stacks(group).items()
            }
            checkpointer.save(target, stacks, save_args=jax.tree.map(lambda _: _CHUNKS, stacks))
            groups.append(tuple(group))
            group.clear()

        for name, parameter in named:
            group[name] = _arrays(parameter)
            size += sum(array.nbytes for array in group[name].values())
            if size >= group_bytes:
                write()
                size = 0
        if group:
            write()
    return tuple(groups)


def restore_parameters(
    checkpoint: ConvertedCheckpoint, compute_format: FloatFormat, place: Place | None = None
) -> Iterator[tuple[str, Parameter]]:
    """The parameters in their order, on the devices, a group at a time.

    Args:
        checkpoint: where they lie.
        compute_format: of those that are neither quantised nor kept in float32.
        place: where each array belongs, so that a process reads the parts that its devices hold and no
            others; by default the first device.

    Raises ValueError for a recipe that this version does not know, or knows in another version.
    """
    recipe = None
    if checkpoint.recipe:
        recipe = recipe_of_label(checkpoint.recipe, checkpoint.stored_formats)
    infos = dict(model_parameters(checkpoint.config))
    place = place or (lambda shape, axes: SingleDeviceSharding(jax.devices()[0]))
    with ocp.PyTreeCheckpointer() as checkpointer:
        for index, names in enumerate(checkpoint.groups):
            formats = {
                name: recipe.format_of(name) if recipe and not infos[name].full_precision else None
                for name in names
            }
            wanted = {name: _wanted(infos[name], formats[name], compute_format) for name in names}
            stacks = _stacks(wanted)
            tree = {
                stack: _stacked(wanted[alike[0]], len(alike), infos[alike[0]], place)
                for stack, alike in stacks.items()
            }
            found = checkpointer.restore(
                checkpoint.group_folder(index).absolute(),
                item=tree,
                restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
            )
            where = {
                name: (stack, number) for stack, alike in stacks.items() for number, name in enumerate(alike)
            }
            for name in names:
                stack, number = where[name]
                yield (
                    name,
                    _parameter(
                        {part: _member(array, number) for part, array in found[stack].items()}, formats[name]
                    ),
                )


def _stacks(parameters: Mapping[str, _Arrays]) -> dict[str, list[str]]:
    """The parameters of a group that are one array, in order: a name of layers and arrays that are alike."""
    stacks: dict[str, list[str]] = {}
    numbers: dict[tuple[str, Any], str] = {}
    for name, arrays in parameters.items():
        field = name.rpartition(".")[2]
        kind = field, tuple((part, array.shape, str(array.dtype)) for part, array in sorted(arrays.items()))
        stack = numbers.setdefault(kind, f"{field}.{len(numbers)}")
        stacks.setdefault(stack, []).append(name)
    return stacks


def _member(stack: jax.Array, number: int) -> jax.Array:
    """One of a stack; of one in the host's memory, a view of it if it begins where XLA wants arrays to, which
    keeps the stack."""
    if stack.is_fully_addressable and stack.sharding.device_set == {jax.devices("cpu")[0]}:
        return jax.device_put(np.asarray(stack)[number], stack.sharding, may_alias=True)
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)


def _arrays(parameter: Any) -> _Arrays:
    """A parameter as Orbax sees it."""
    if not isinstance(parameter, QuantisedWeight):
        return {"values": parameter}
    arrays = {"values": parameter.values, "scales": parameter.scales, "zeros": parameter.zeros}
    return {name: array for name, array in arrays.items() if array is not None}


def _parameter(arrays: _Arrays, format: WeightFormat | None) -> Parameter:
    if format is None:
        return arrays["values"]
    return QuantisedWeight(arrays["values"], arrays["scales"], arrays.get("zeros"), format)


@functools.cache
def _wanted(info: ParameterInfo, format: WeightFormat | None, compute_format: FloatFormat) -> _Arrays:
    """Shapes and types of a parameter's arrays."""
    if format is not None:
        return _arrays(jax.eval_shape(lambda: blank(info.shape, format, info.num_input_axes)))
    plain = jnp.float32 if info.full_precision else jnp.dtype(compute_format)
    return {"values": jax.ShapeDtypeStruct(info.shape, plain)}


def _stacked(arrays: _Arrays, count: int, info: ParameterInfo, place: Place) -> _Arrays:
    """So many of a parameter's arrays as one, and where it belongs."""
    grouped = "scales" in arrays and arrays["scales"].ndim > len(info.axes) - info.num_input_axes
    scale_axes = info.scale_axes(grouped)
    axes = {"values": info.axes, "scales": scale_axes, "zeros": scale_axes}

    def stack(part: str, array: Any) -> jax.ShapeDtypeStruct:
        shape = (count, *array.shape)
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=place(shape, (None, *axes[part])))

    return {part: stack(part, array) for part, array in arrays.items()}
