"""Pages of the pool on their way to the host and back: programs of one small width, and their results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxserve.config import EngineConfig
from jaxserve.engine.shardings import shardings_of
from jaxserve.engine.state import DeviceState
from jaxserve.engine.words import fed, spans_processes
from jaxserve.model.cache import CACHE_AXES, CacheGroup
from sharding import named_sharding, per_shard

PAGES_PER_MOVE = 8
"""Pages that one call of a program moves; the rest of a last call is page 0, which nobody is given."""

MOVED_AXES = (None, *CACHE_AXES)
"""Of pages with all their layers: every device moves its own heads' and layers'."""
Bytes = npt.NDArray[np.uint8]
Contents = tuple[jax.Array | np.ndarray, ...]
"""[PAGES_PER_MOVE, num_layers, ...] of the pool, and of its scales if it has them."""


@dataclass(frozen=True)
class PageProgram:
    """How the pages of one cache group are moved."""

    read: Callable[[DeviceState, np.ndarray], Contents]
    write: Callable[[DeviceState, Contents, np.ndarray], DeviceState]
    """Donates the state."""
    parts: tuple[tuple[tuple[int, ...], np.dtype], ...]
    """Shape and type of what one page holds in each array of the group."""

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers, scales included."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts)

    def unpack(self, data: Bytes) -> Contents:
        """Pages as bytes [n, page_bytes] in the form that `write` takes, filled up with zeros."""
        padded = np.zeros((PAGES_PER_MOVE, data.shape[1]), np.uint8)
        padded[: len(data)] = data
        contents: list[np.ndarray] = []
        start = 0
        for shape, dtype in self.parts:
            end = start + prod(shape) * dtype.itemsize
            part = np.ascontiguousarray(padded[:, start:end]).view(dtype)
            contents.append(part.reshape(PAGES_PER_MOVE, *shape))
            start = end
        return tuple(contents)


class DevicePageRead:
    """Pages that are being copied to the host."""

    def __init__(self, moves: Sequence[Contents], num_pages: int) -> None:
        self._moves = moves
        self._num_pages = num_pages
        for array in self._arrays():
            array.copy_to_host_async()

    @property
    def ready(self) -> bool:
        """Whether the device has made the copies."""
        return all(array.is_ready() for array in self._arrays())

    def take(self) -> Bytes:
        """[pages, page_bytes] what the pages held when the copy was started; waits for it."""
        moves = [
            np.concatenate([_as_bytes(np.asarray(part)) for part in contents], axis=1)
            for contents in self._moves
        ]
        return np.concatenate(moves)[: self._num_pages]

    def _arrays(self) -> Iterator[Any]:
        for contents in self._moves:
            yield from contents


def compile_page_programs(
    config: EngineConfig, state: DeviceState, mesh: Mesh | None = None
) -> tuple[PageProgram, ...]:
    """The programs of every cache group, from the state's shapes."""
    groups = enumerate(config.cache.num_pages)
    return tuple(_compile(group, num_pages, state, mesh) for group, num_pages in groups)


def page_calls(pages: Sequence[int], num_pages: int) -> Iterator[np.ndarray]:
    """The pages in calls of PAGES_PER_MOVE. Raises ValueError, naming the page, if one does not exist."""
    for page in pages:
        if not 0 <= page < num_pages:
            raise ValueError(f"page {page} is out of range: the group has {num_pages} pages")
    for start in range(0, len(pages), PAGES_PER_MOVE):
        call = np.zeros(PAGES_PER_MOVE, np.int32)
        part = pages[start : start + PAGES_PER_MOVE]
        call[: len(part)] = part
        yield call


def read_group(group: CacheGroup, pages_B: jax.Array, *, num_pages: int) -> tuple[jax.Array, ...]:
    """Copies of pages, with all layers of one page together."""

    def read_pages(array: jax.Array) -> jax.Array:
        firsts_L = jnp.arange(array.shape[0] // num_pages, dtype=jnp.int32) * num_pages
        return array[pages_B[:, None] + firsts_L]

    return tuple(read_pages(array) for array in _arrays(group))


def write_group(
    group: CacheGroup, contents: tuple[jax.Array, ...], pages_B: jax.Array, *, num_pages: int
) -> CacheGroup:
    """Fill pages, in place if the group is donated."""

    def write_pages(array: jax.Array, values_BLx: jax.Array) -> jax.Array:
        def write_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
            for number in range(PAGES_PER_MOVE):
                value = jax.lax.dynamic_index_in_dim(values_BLx[number], layer)
                first = layer * num_pages + pages_B[number]
                array = jax.lax.dynamic_update_slice_in_dim(array, value, first, 0)
            return array

        return jax.lax.fori_loop(0, values_BLx.shape[1], write_layer, array)

    written = [write_pages(*pair) for pair in zip(_arrays(group), contents, strict=True)]
    return CacheGroup(pool=written[0], scales=written[1] if len(written) > 1 else None)


def _compile(group: int, num_pages: int, state: DeviceState, mesh: Mesh | None) -> PageProgram:
    parts = tuple(
        ((part.shape[0] // num_pages, *part.shape[1:]), np.dtype(part.dtype))
        for part in _arrays(state.cache[group])
    )
    pages = np.zeros(PAGES_PER_MOVE, np.int32)
    moved = [((PAGES_PER_MOVE, *shape), dtype) for shape, dtype in parts]
    places = tuple(_place(shape, mesh) for shape, _ in moved)
    contents = tuple(
        jax.ShapeDtypeStruct(*part, sharding=place) for part, place in zip(moved, places, strict=True)
    )

    def read(state: DeviceState, pages_B: jax.Array) -> tuple[jax.Array, ...]:
        run = per_shard(
            functools.partial(read_group, num_pages=num_pages),
            mesh,
            in_axes=(CACHE_AXES, ()),
            out_axes=MOVED_AXES,
        )
        return run(state.cache[group], pages_B)

    def write(state: DeviceState, contents: tuple[jax.Array, ...], pages_B: jax.Array) -> DeviceState:
        run = per_shard(
            functools.partial(write_group, num_pages=num_pages),
            mesh,
            in_axes=(CACHE_AXES, MOVED_AXES, ()),
            out_axes=CACHE_AXES,
        )
        written = run(state.cache[group], contents, pages_B)
        return dataclasses.replace(state, cache=(*state.cache[:group], written, *state.cache[group + 1 :]))

    state_places = None if mesh is None else shardings_of(state)
    read_fed, read_given = fed(read, 1, (pages,), mesh)
    write_fed, write_given = write, (contents, *read_given)
    if spans_processes(mesh):
        write_fed, write_given = fed(write, 1, (contents, pages), mesh)
    return PageProgram(
        jax.jit(read_fed, out_shardings=_on_host(places)).lower(state, *read_given).compile(),
        jax.jit(write_fed, donate_argnums=0, out_shardings=state_places).lower(state, *write_given).compile(),
        parts,
    )


def _place(shape: tuple[int, ...], mesh: Mesh | None) -> Sharding | None:
    """Where contents lie: cut as the pool is, or whole on every device for a host that has only some."""
    if mesh is None:
        return None
    if spans_processes(mesh):
        return NamedSharding(mesh, PartitionSpec())
    return named_sharding(shape, MOVED_AXES, mesh)


def _on_host(places: tuple[Sharding | None, ...]) -> tuple[Sharding | None, ...]:
    """Pinned memory of the host, which the devices write to themselves; where they stay if there is none."""
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or "pinned_host" not in kinds:
        return places
    alone = SingleDeviceSharding(device)
    return tuple((place or alone).with_memory_kind("pinned_host") for place in places)


def _arrays(group: CacheGroup) -> tuple[jax.Array, ...]:
    return (group.pool,) if group.scales is None else (group.pool, group.scales)


def _as_bytes(pages: np.ndarray) -> Bytes:
    """[pages, bytes]."""
    return np.ascontiguousarray(pages).reshape(len(pages), -1).view(np.uint8)
