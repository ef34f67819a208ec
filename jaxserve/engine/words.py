"""What the host of one process says to the programs of all: words, which the program itself spreads.

They are an array with a part for each device of the mesh, of which all but the leader's are zeros; their sum
is what the leader says. Words are whole numbers, so that every bit of a float comes as it was, in any format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.shardings import everywhere
from sharding import AnyMesh

_WORD_BYTES = 4


def as_words(tree: Any) -> np.ndarray:
    """uint32 `[n]`: the arrays of a tree, one after another."""
    return np.concatenate([_array_words(np.asarray(array)) for array in jax.tree.leaves(tree)])


def from_words(words: jax.Array, examples: Any) -> Any:
    """The tree again, inside a program. `examples`: arrays of the same shapes and types."""
    leaves, structure = jax.tree.flatten(examples)
    arrays: list[jax.Array] = []
    start = 0
    for leaf in leaves:
        end = start + _num_words(leaf)
        arrays.append(_array_of(words[start:end], leaf))
        start = end
    return jax.tree.unflatten(structure, arrays)


def fed(
    program: Callable[..., Any], num_own: int, given: tuple[Any, ...], mesh: Mesh | None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program as it takes what the host has, and the shapes of that: in a job of several processes one
    array, as of `parts`.

    Args:
        program: of `num_own` arguments that lie on the devices, and then of such that the host has.
        given: examples of these.
        mesh: the devices.
    """
    if mesh is None or not spans_processes(mesh):
        return program, everywhere(given, mesh)
    return spoken_to(program, num_own, given, mesh), (_shape_of_parts(given, mesh),)


def spoken_to(
    program: Callable[..., Any], num_own: int, given: tuple[Any, ...], mesh: Mesh
) -> Callable[..., Any]:
    """A program that takes in place of what the host has an array as of `parts`; else as of `fed`."""

    def add_up(words: jax.Array) -> jax.Array:
        return jax.lax.psum(words[0], mesh.axis_names)

    parts, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    gather = jax.shard_map(add_up, mesh=mesh, in_specs=parts, out_specs=whole, check_vma=False)

    def with_words(*arguments: Any) -> Any:
        return program(*arguments[:num_own], *from_words(gather(arguments[num_own]), given))

    return with_words


def parts(words: np.ndarray, mesh: Mesh) -> jax.Array:
    """`[devices, n]`: on the first device of this process the words, on its others zeros."""
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    first, blank = words[None], np.zeros((1, *words.shape), words.dtype)
    shards = [
        jax.device_put(blank if number else first, device) for number, device in enumerate(mesh.local_devices)
    ]
    return jax.make_array_from_single_device_arrays((mesh.size, *words.shape), place, shards)


def spans_processes(mesh: AnyMesh | None) -> bool:
    """Whether this process has only some of a mesh's devices."""
    return mesh is not None and jax.process_count() > 1


def _shape_of_parts(given: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    num_words = sum(map(_num_words, jax.tree.leaves(given)))
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.ShapeDtypeStruct((mesh.size, num_words), np.uint32, sharding=place)


def _num_words(array: Any) -> int:
    return -(-prod(array.shape) * np.dtype(array.dtype).itemsize // _WORD_BYTES)


def _array_words(array: np.ndarray) -> np.ndarray:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if rest := len(data) % _WORD_BYTES:
        data = np.concatenate([data, np.zeros(_WORD_BYTES - rest, np.uint8)])
    return data.view(np.uint32)


def _array_of(words: jax.Array, example: Any) -> jax.Array:
    shape: Sequence[int] = example.shape
    numbers = jax.lax.bitcast_convert_type(words, jnp.dtype(example.dtype)).reshape(-1)
    return numbers[: prod(shape)].reshape(shape)
