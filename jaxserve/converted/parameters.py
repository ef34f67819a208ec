"""A model's parameters to Orbax checkpoints (OCDBT), and from there straight to where each belongs.

A checkpoint holds a group of parameters, so that writing needs the memory of one group. Those of a name that
are alike in all layers are one array in it, a chunk for each: Orbax takes time for every array.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxserve.config import FloatFormat
from jaxserve.converted.mapping import MappedCheckpoint, fetch, write_index
from jaxserve.model.parameters import ParameterInfo, model_parameters
from jaxserve.quantization import WeightFormat, recipe_of_label
from jaxserve.quantization.weight import QuantisedWeight, blank
from jaxserve.weights.converted import ConvertedCheckpoint, group_folder

Parameter = np.ndarray | jax.Array | QuantisedWeight
_Arrays = dict[str, Any]
"""The arrays of a parameter, or their shapes and types: `values`, and `scales` and `zeros` if it has them."""
GROUP_BYTES = 2**30
"""At which a checkpoint is closed and the next one begun."""
CHUNK_BYTES = 2**30
"""Most of an array that lies in one piece; larger ones are put together again as they are read."""


class Place(Protocol):
    """Says where an array of a parameter belongs."""

    def __call__(self, shape: Sequence[int], axes: Sequence[str | None], name: str, /) -> Sharding:
        """`axes`: logical names, see `ParameterInfo`; `name`: of the parameter."""
        ...


def save_parameters(
    named: Iterable[tuple[str, Parameter]],
    folder: Path,
    group_bytes: int = GROUP_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[tuple[str, ...], ...]:
    """Write parameters in the order in which they come; returns the names in each checkpoint."""
    groups: list[tuple[str, ...]] = []
    group: dict[str, _Arrays] = {}
    size = 0
    import orbax.checkpoint as ocp  # Takes half a second, which starting from a checkpoint does without.

    chunks = ocp.SaveArgs(chunk_byte_size=chunk_bytes, shard_axes=(0,))
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
            checkpointer.save(target, stacks, save_args=jax.tree.map(lambda _: chunks, stacks))
            write_index(target)
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
    """The parameters in their order, where they belong; each byte of the files is read once.

    Args:
        checkpoint: where they lie.
        compute_format: of those that are neither quantised nor kept in float32.
        place: where each array belongs, so that a device is given the parts that it holds and no others; by
            default the first device.

    Raises ValueError for a recipe that this version does not know, or knows in another version.
    """
    recipe = None
    if checkpoint.recipe:
        recipe = recipe_of_label(checkpoint.recipe, checkpoint.stored_formats)
    infos = dict(model_parameters(checkpoint.config))
    place = place or (lambda shape, axes, name: SingleDeviceSharding(jax.devices()[0]))
    for index, names in enumerate(checkpoint.groups):
        formats = {
            name: recipe.format_of(name) if recipe and not infos[name].full_precision else None
            for name in names
        }
        wanted = {name: _wanted(infos[name], formats[name], compute_format) for name in names}
        found = MappedCheckpoint(checkpoint.group_folder(index))
        numbers = {
            name: (stack, number)
            for stack, alike in _stacks(wanted).items()
            for number, name in enumerate(alike)
        }
        for name in names:
            stack, number = numbers[name]
            axes = _axes(wanted[name], infos[name])
            arrays = {
                part: _placed(
                    found.member(f"{stack}.{part}", number, array.shape),
                    array,
                    place(array.shape, axes[part], name),
                )
                for part, array in wanted[name].items()
            }
            yield name, _parameter(arrays, formats[name])


def _placed(found: np.ndarray, wanted: Any, sharding: Sharding) -> jax.Array | jax.ShapeDtypeStruct:
    """An array where it belongs, in the type that it is wanted in; its shape alone where that is not here.

    On a CPU it is the mapped file itself, if it begins where XLA wants arrays to, and has been read then.
    """
    if not sharding.addressable_devices:
        return jax.ShapeDtypeStruct(wanted.shape, wanted.dtype)
    array = found.astype(wanted.dtype, copy=False)
    if len(sharding.device_set) > 1:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    if jax.default_backend() != "cpu":
        return jax.device_put(array, sharding)
    return jax.device_put(fetch(array), sharding, may_alias=True)


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


def _axes(arrays: _Arrays, info: ParameterInfo) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of each of a parameter's arrays."""
    grouped = "scales" in arrays and arrays["scales"].ndim > len(info.axes) - info.num_input_axes
    scale_axes = info.scale_axes(grouped)
    return {"values": info.axes, "scales": scale_axes, "zeros": scale_axes}
