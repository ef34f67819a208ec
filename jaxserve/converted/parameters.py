"""A model's parameters to and from Orbax checkpoints (OCDBT), each restored straight to where it belongs.

A checkpoint holds a group of parameters by their canonical names, so that writing needs the memory of one
group. Parameters are not stacked in it: how layers are stored on a device is the backend's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    group: dict[str, dict[str, Any]] = {}
    size = 0
    with ocp.PyTreeCheckpointer() as checkpointer:

        def write() -> None:
            target = group_folder(folder, len(groups)).absolute()
            checkpointer.save(target, group, save_args=jax.tree.map(lambda _: _CHUNKS, group))
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
            wanted = {name: _wanted(infos[name], formats[name], compute_format, place) for name in names}
            found = checkpointer.restore(
                checkpoint.group_folder(index).absolute(),
                item=wanted,
                restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            )
            for name in names:
                yield name, _parameter(found.pop(name), formats[name])


def _arrays(parameter: Parameter) -> dict[str, Any]:
    """A parameter as Orbax sees it."""
    if not isinstance(parameter, QuantisedWeight):
        return {"values": parameter}
    arrays = {"values": parameter.values, "scales": parameter.scales, "zeros": parameter.zeros}
    return {name: array for name, array in arrays.items() if array is not None}


def _parameter(arrays: dict[str, Any], format: WeightFormat | None) -> Parameter:
    if format is None:
        return arrays["values"]
    return QuantisedWeight(arrays["values"], arrays["scales"], arrays.get("zeros"), format)


def _wanted(
    info: ParameterInfo, format: WeightFormat | None, compute_format: FloatFormat, place: Place
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, types and places of a parameter's arrays."""
    plain = jnp.float32 if info.full_precision else jnp.dtype(compute_format)
    whole: Any = jax.ShapeDtypeStruct(info.shape, plain)
    if format is not None:
        whole = jax.eval_shape(lambda: blank(info.shape, format, info.num_input_axes))
    arrays = _arrays(whole)
    scale_axes = info.scale_axes(grouped=format is not None and format.group > 0)
    axes = {"values": info.axes, "scales": scale_axes, "zeros": scale_axes}
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place(array.shape, axes[name]))
        for name, array in arrays.items()
    }
