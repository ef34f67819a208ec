"""Pages on their way from the pool of one engine to that of another, from devices to devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.mesh import mesh_of
from jaxserve.engine.page_moves import MOVED_AXES, PAGES_PER_MOVE, page_calls, read_group, write_group
from jaxserve.engine.shardings import everywhere, shardings_of
from jaxserve.engine.state import DeviceState
from jaxserve.model.cache import CACHE_AXES, CacheGroup
from sharding import PIPE, TENSOR, named_sharding, per_shard

Contents = tuple[jax.Array, ...]
"""[PAGES_PER_MOVE, num_layers, ...] of the pool, and of its scales if it has them."""


class DevicePageLink:
    """A `PageLink` between engines of one model, each on a mesh of its own.

    Where both meshes cut a page alike, each device sends its part to its counterpart. Elsewhere a page is put
    together first, a head that is there several times once, and goes whole to every device, which keeps its
    part: as much goes to each as all of them hold.
    """

    def __init__(self, source: DeviceEngine, target: DeviceEngine) -> None:
        """Compile what moves pages. Raises ValueError where the two have other layers on a page."""
        check_linkable(source.config, target.config)
        self._source = source
        self._target = target
        self._num_pages = source.config.cache.num_pages, target.config.cache.num_pages
        groups = range(len(source.config.cache.num_pages))
        self._sends = [_compile_send(source, target.config, group) for group in groups]
        self._receives = [_compile_receive(target, source.config, group) for group in groups]
        for engine in (source, target):
            engine.mark_ready()

    def move(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Start to copy pages, in order with the dispatches of both engines.

        Raises ValueError for a page that does not exist.
        """
        send, (receive, places) = self._sends[group], self._receives[group]
        own, others = (num_pages[group] for num_pages in self._num_pages)
        for source, target in zip(page_calls(sources, own), page_calls(targets, others), strict=True):
            contents = jax.device_put(self._source.read_state(send, source), places)
            self._target.update_state(receive, contents, target)


def check_linkable(source: EngineConfig, target: EngineConfig) -> None:
    """Raise ValueError, naming the mesh axis and the sizes, where pages of one cannot become the other's."""
    one, other = (dict(config.mesh).get(PIPE, 1) for config in (source, target))
    if one != other:
        raise ValueError(
            f"prompts are computed on {one} stages of mesh axis {PIPE!r} and answers on {other}: pages are "
            "moved between equally many"
        )


def _compile_send(engine: DeviceEngine, receiver: EngineConfig, group: int) -> Callable[..., Contents]:
    config, mesh = engine.config, _mesh(engine)
    heads, common = config.model.num_kv_heads, _common_heads(config, receiver)
    read = per_shard(
        functools.partial(read_group, num_pages=config.cache.num_pages[group]),
        mesh,
        in_axes=(CACHE_AXES, ()),
        out_axes=MOVED_AXES,
    )

    def send(state: DeviceState, pages_B: jax.Array) -> Contents:
        contents = read(state.cache[group], pages_B)
        return tuple(_with_heads(part, heads, common) for part in contents)

    shapes = _contents(engine, group, common)
    places = tuple(_place(shape.shape, mesh, config, receiver) for shape in shapes)
    pages = everywhere(np.zeros(PAGES_PER_MOVE, np.int32), mesh)
    return jax.jit(send, out_shardings=places).lower(engine.state_shapes, pages).compile()


def _compile_receive(
    engine: DeviceEngine, sender: EngineConfig, group: int
) -> tuple[Callable[..., DeviceState], tuple[NamedSharding, ...]]:
    """The program, and where it takes contents from."""
    config, mesh = engine.config, _mesh(engine)
    heads, common = config.model.num_kv_heads, _common_heads(config, sender)
    write = per_shard(
        functools.partial(write_group, num_pages=config.cache.num_pages[group]),
        mesh,
        in_axes=(CACHE_AXES, MOVED_AXES, ()),
        out_axes=CACHE_AXES,
    )

    def receive(state: DeviceState, contents: Contents, pages_B: jax.Array) -> DeviceState:
        own = tuple(_with_heads(part, common, heads) for part in contents)
        written: CacheGroup = write(state.cache[group], own, pages_B)
        return dataclasses.replace(state, cache=(*state.cache[:group], written, *state.cache[group + 1 :]))

    state = engine.state_shapes
    shapes = _contents(engine, group, common)
    places = tuple(_place(shape.shape, mesh, config, sender) for shape in shapes)
    contents = tuple(
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)
        for shape, place in zip(shapes, places, strict=True)
    )
    pages = everywhere(np.zeros(PAGES_PER_MOVE, np.int32), mesh)
    jitted = jax.jit(receive, donate_argnums=0, out_shardings=shardings_of(state))
    return jitted.lower(state, contents, pages).compile(), places


def _mesh(engine: DeviceEngine) -> Mesh:
    mesh = mesh_of(engine.config)
    assert mesh is not None, "an engine with a counterpart names its devices"
    return mesh


def _common_heads(one: EngineConfig, other: EngineConfig) -> int:
    """KV heads that pages are moved with: fewer than on a mesh that has each several times."""
    return gcd(one.model.num_kv_heads, other.model.num_kv_heads)


def _place(shape: tuple[int, ...], mesh: Mesh, own: EngineConfig, other: EngineConfig) -> NamedSharding:
    """Where an engine has the contents of pages that it sends or gets: cut as its pool is if the other cuts
    its own alike, else whole."""
    if dict(own.mesh).get(TENSOR, 1) == dict(other.mesh).get(TENSOR, 1):
        return named_sharding(shape, MOVED_AXES, mesh)
    return NamedSharding(mesh, PartitionSpec())


def _contents(engine: DeviceEngine, group: int, num_heads: int) -> tuple[Any, ...]:
    """Shapes of what a move of a group's pages holds."""
    config, cache = engine.config, engine.state_shapes.cache[group]
    num_pages, heads = config.cache.num_pages[group], config.model.num_kv_heads
    return tuple(
        jax.ShapeDtypeStruct(
            (
                PAGES_PER_MOVE,
                array.shape[0] // num_pages,
                array.shape[1] // heads * num_heads,
                array.shape[2],
            ),
            array.dtype,
        )
        for array in (cache.pool, cache.scales)
        if array is not None
    )


def _with_heads(part_BLRx: jax.Array, heads: int, wanted: int) -> jax.Array:
    """Contents with KV heads left out that are there several times, or repeated."""
    if heads == wanted:
        return part_BLRx
    size, layers, rows, lanes = part_BLRx.shape
    by_head = part_BLRx.reshape(size, layers, heads, rows // heads, lanes)
    changed = by_head[:, :, :: heads // wanted] if wanted < heads else jnp.repeat(by_head, wanted // heads, 2)
    return changed.reshape(size, layers, rows // heads * wanted, lanes)
