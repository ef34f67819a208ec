"""From a checkpoint's canonical arrays to the parameter tree on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import FloatFormat, LayerKind, ModelConfig
from jaxserve.engine import huge_pages
from jaxserve.engine.huge_pages import HugePages
from jaxserve.engine.placement import is_elsewhere, to_shards
from jaxserve.engine.shardings import parameter_shardings, placed, segment_shardings, weight_shardings
from jaxserve.model.parameters import EXPERT_NAMES, ParameterInfo, layer_parameters, model_parameters
from jaxserve.model.spread import regrouped_for
from jaxserve.model.stages import stages_of
from jaxserve.model.transformer import LayerLoop
from jaxserve.quantization import Recipe
from jaxserve.quantization.stacked import fits_stack, for_stack
from jaxserve.quantization.weight import QuantisedWeight, blank, quantise
from jaxserve.weights.quantised import StoredMatrix
from sharding import AnyMesh, num_shards, stage_mesh

_HOST_STACK_BYTES = 2**22
"""Up to which size a stack on a CPU is put together by numpy: a program for each shape takes longer to
compile than small arrays to copy."""

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
    infos, other = dict(model_parameters(model)), jnp.dtype(compute_format)

    def convert(name: str, array: Any) -> Any:
        info = infos[name]
        if info.full_precision:
            return array
        format = recipe.format_of(name)
        return quantise(array, format, info.num_input_axes) if format else array.astype(other)

    for name, array in named:
        run = functools.partial(convert, name)
        yield name, jax.eval_shape(run, array) if is_elsewhere(array) else run(array)


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
    named = to_shards(named, model, mesh)
    if mesh is not None and num_shards("stages", mesh) > 1:
        return _place_stages(named, model, layer_loop, mesh)
    if mesh is not None:
        tree = _tree(named, model, layer_loop, mesh)
        return jax.device_put(tree, parameter_shardings(tree, model, mesh))
    memory = HugePages() if huge_pages.is_available() else None
    tree = _tree(named, model, layer_loop, mesh, memory)
    return jax.tree.map(lambda array: jax.device_put(array) if isinstance(array, np.ndarray) else array, tree)


def _place_stages(named: Named, model: ModelConfig, layer_loop: LayerLoop, mesh: Mesh) -> dict[str, Any]:
    """The layers of every stage on its own devices, and then as arrays over all of them.

    Of stages on devices of other processes nothing is here.
    """
    stages, infos = stages_of(model, num_shards("stages", mesh)), dict(model_parameters(model))
    meshes = {stage: stage_mesh(mesh, stage) for stage in range(len(stages.layers))}
    own = {stage: of for stage, of in meshes.items() if of.local_devices}
    layers = {stage: _Layers(stages.model, layer_loop, of, of_stages=True) for stage, of in own.items()}
    outer: dict[str, Any] = {}
    alike: dict[tuple[LayerKind, str], Any] = {}
    for full_name, array in named:
        if not full_name.startswith("layers."):
            outer[full_name] = array
            continue
        _, layer, name = full_name.split(".")
        stage, number = stages.place_of(int(layer))
        if stage in own:
            layers[stage].add(number, name, array)
        alike[model.layers[int(layer)], name] = jax.tree.map(
            lambda array, place: (array.shape, array.dtype, place.spec),
            array,
            weight_shardings(array, infos[full_name], meshes[stage]),
        )
    for stage, of in own.items():
        for number in (number for number, layer in enumerate(stages.layers[stage]) if layer is None):
            kind = stages.model.layers[number]
            for name in layer_parameters(model, kind):
                layers[stage].add(number, name, _zeros(alike[kind, name], of))
    placed_layers = [
        jax.device_put(layers[stage].segments, segment_shardings(layers[stage].segments, stages.model, of))
        for stage, of in own.items()
    ]
    shapes = _of_all_stages(placed_layers[0], len(meshes))
    tree = {**outer, "segments": shapes}
    shardings = parameter_shardings(tree, model, mesh)
    segments = jax.tree.map(_joined, shapes, shardings.pop("segments"), *placed_layers)
    return {**jax.device_put(outer, shardings), "segments": segments}


def _zeros(alike: Any, mesh: Mesh) -> Any:
    """A layer's parameter that is padding, from shapes, types and places of another's."""
    return jax.tree.map(
        lambda one: jnp.zeros(one[0], one[1], device=NamedSharding(mesh, one[2])),
        alike,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def _of_all_stages(segments: Any, num_stages: int) -> Any:
    """The shapes of all stages' layers, from arrays or shapes of one's."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct((num_stages * array.shape[0], *array.shape[1:]), array.dtype),
        segments,
    )


def _joined(shape: jax.ShapeDtypeStruct, sharding: NamedSharding, *of_stages: jax.Array) -> jax.Array:
    """One array of every stage's, none of which is moved."""
    parts = [shard.data for array in of_stages for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, parts)


def _tree(
    named: Named,
    model: ModelConfig,
    layer_loop: LayerLoop,
    mesh: AnyMesh | None,
    memory: HugePages | None = None,
) -> dict[str, Any]:
    """Parameters, where they lie, as the tree of them all; on a mesh with stages as the first has them.

    `memory` is where they stay, if anywhere else than where XLA puts them.
    """
    tree: dict[str, Any] = {}
    layers = _Layers(model, layer_loop, mesh, memory, of_stages=num_shards("stages", mesh) > 1)
    keep = jnp.asarray if memory is None else memory.keep
    for full_name, array in named:
        if not full_name.startswith("layers."):
            tree[full_name] = jax.block_until_ready(jax.tree.map(keep, array))
            continue
        _, layer, name = full_name.split(".")
        layers.add(int(layer), name, array)
    tree["segments"] = layers.segments
    return tree


class _Layers:
    """The parameters of layers, put together as they arrive."""

    def __init__(
        self,
        model: ModelConfig,
        layer_loop: LayerLoop,
        mesh: AnyMesh | None,
        memory: HugePages | None = None,
        *,
        of_stages: bool,
    ) -> None:
        """`of_stages`: arrays of one layer have an axis before theirs, along which those of other stages lie.

        `model` has these layers and `mesh` their devices, of one stage if there are several.
        """
        self._model, self._layer_loop, self._mesh = model, layer_loop, mesh
        self._of_stages, self._memory = of_stages, memory
        self._places = _layer_positions(model)
        self._entries: list[list[dict[str, Any]]] = [
            [{} for _ in segment.pattern] for segment in model.segments
        ]

    def add(self, layer: int, name: str, array: Any) -> None:
        """One parameter of a layer, which may be quantised.

        It is waited for: a host that ran ahead of its devices would hold all that it read meanwhile.
        """
        segment, position, repetition = self._places[layer]
        entries, count = self._entries[segment][position], self._model.segments[segment].count
        info = layer_parameters(self._model, self._model.layers[layer])[name]
        num_parts = num_shards(info.first_input_axis, self._mesh)
        if self._in_stack(name, array) and fits_stack(array, num_parts):
            stack = _with_member(entries.get(name), for_stack(array), repetition, count)
            entries[name] = jax.block_until_ready(stack)
            return
        stacked = self._layer_loop == "stacked" or info.full_precision or name in EXPERT_NAMES
        stacked |= (
            self._layer_loop == "indexed" and isinstance(array, QuantisedWeight) and array.format.row_bits > 0
        )
        if not stacked and self._of_stages:
            array = _with_axis_of_stages(array)
        place = repetition, count
        stack = _with_repetition(entries.get(name), array, place, self._memory, stacked=stacked)
        entries[name] = jax.block_until_ready(stack)

    def _in_stack(self, name: str, array: Any) -> bool:
        """Whether a parameter is wanted in the form in which kernels read stacks."""
        if name in EXPERT_NAMES:
            return False
        # On GPU matrices lie apart, but XLA would write those of four bits out widened, in every step.
        apart = (
            self._layer_loop == "unrolled" and isinstance(array, QuantisedWeight) and array.format.bits == 4
        )
        return self._layer_loop == "stacked" or apart

    @property
    def segments(self) -> tuple[tuple[dict[str, Any], ...], ...]:
        """For each segment and each position in its pattern the parameters by name."""
        return tuple(
            tuple({name: _as_tuples(entry) for name, entry in entries.items()} for entries in positions)
            for positions in self._entries
        )


def _with_axis_of_stages(array: Any) -> Any:
    """A matrix that is no member of a stack; scales always are."""
    if isinstance(array, QuantisedWeight):
        return dataclasses.replace(array, values=jnp.expand_dims(array.values, 0))
    return jnp.expand_dims(array, 0)


def _as_tuples(entry: Any) -> Any:
    """A parameter whose arrays of single layers are tuples."""
    return jax.tree.map(
        lambda one: tuple(one) if isinstance(one, list) else one,
        entry,
        is_leaf=lambda one: isinstance(one, list),
    )


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

    num_stages = num_shards("stages", mesh)
    of_stage = stages_of(model, num_stages).model

    def place() -> dict[str, Any]:
        named = ((name, parameter(name, info)) for name, info in model_parameters(of_stage))
        return _tree(named, of_stage, layer_loop, mesh)

    shapes = jax.eval_shape(place)
    if num_stages > 1:
        shapes["segments"] = _of_all_stages(shapes["segments"], num_stages)
    return shapes if mesh is None else placed(shapes, parameter_shardings(shapes, model, mesh))


def _with_repetition(
    entry: Any, array: Any, place: tuple[int, int], memory: HugePages | None, *, stacked: bool
) -> Any:
    """A stack, or a list, with one more repetition, `place` of so many; `entry` is None for the first."""
    if isinstance(array, QuantisedWeight):
        old = entry or QuantisedWeight(None, None, None, array.format)
        add = functools.partial(_with_repetition, place=place, memory=memory)
        zeros = array.zeros
        return QuantisedWeight(
            add(old.values, array.values, stacked=stacked),
            add(old.scales, array.scales, stacked=True),
            None if zeros is None else add(old.zeros, zeros, stacked=True),
            array.format,
        )
    repetition, count = place
    if not stacked:
        members: list[Any] = entry or [None] * count
        members[repetition] = jnp.asarray(array) if memory is None else memory.keep(array)
        return members
    if entry is None:
        entry = _empty_stack(array, count, memory)
    if isinstance(entry, np.ndarray):
        entry[repetition] = array
        return entry
    return _set_repetition(entry, array, repetition)


def _is_on_host(array: Any) -> bool:
    """Whether an array is in the memory that the devices compute in, and numpy too."""
    if isinstance(array, Tracer) or jax.default_backend() != "cpu":
        return False
    return isinstance(array, np.ndarray) or len(array.sharding.device_set) == 1


def _empty_stack(array: Any, count: int, memory: HugePages | None = None) -> np.ndarray | jax.Array:
    """For so many arrays that are spread over devices as this one is."""
    shape = count, *array.shape
    if _is_on_host(array):
        if memory is not None:
            return memory.empty(shape, array.dtype)
        if count * array.size * array.dtype.itemsize <= _HOST_STACK_BYTES:
            return np.zeros(shape, array.dtype)
    place = getattr(array, "sharding", None)
    if isinstance(place, NamedSharding) and not place.mesh.empty and isinstance(place.mesh, Mesh):
        place = NamedSharding(place.mesh, PartitionSpec(None, *place.spec))
    else:
        place = None
    return jnp.zeros(shape, array.dtype, device=place)


def _with_member(stack: Any, member: Any, repetition: int, count: int) -> Any:
    """A stack of `count` trees with one more of them; `stack` is None for the first."""
    if stack is None:
        stack = jax.tree.map(lambda array: _empty_stack(array, count), member)
    return jax.tree.map(lambda whole, array: _set_repetition(whole, array, repetition), stack, member)


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
