"""The KV state: a tuple of groups, one for each window size of the model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.model.stages import stages_of
from pallas_kernels.page_layout import PageLayout
from sharding import PIPE

_CPU_STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}

CACHE_AXES = ("stages", "kv_heads", None)
"""Logical axes of a pool and of its scales: both are head-major, so that a shard holds whole heads."""


@flax.struct.dataclass
class CacheGroup:
    """The pages of all layers that share a window."""

    pool: jax.Array
    """[num_layers * num_pages, rows, 128] in the group's PageLayout; of a pipeline the layers of the first
    stage, then those of the next, padding included."""
    scales: jax.Array | None
    """[num_layers * num_pages, scale_rows, scale_lanes] float32 for a pool of eight bits, else None."""


Cache = tuple[CacheGroup, ...]


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer of the model finds its pages."""

    group: int
    index: int
    """The layer's number within its group; its first page is index * num_pages."""


def layer_places(model: ModelConfig) -> tuple[LayerPlace, ...]:
    """The group of each layer, and its number there."""
    windows = model.windows
    seen = [0] * len(windows)
    places: list[LayerPlace] = []
    for kind in model.layers:
        group = windows.index(kind.window)
        places.append(LayerPlace(group, seen[group]))
        seen[group] += 1
    return tuple(places)


def page_layouts(config: EngineConfig, platform: str) -> tuple[PageLayout, ...]:
    """The layout of each group's pool on a platform."""
    kv_format = config.cache.kv_format
    # XLA on CPU widens a whole pool of small floats to float32 to scatter into it; integers it leaves alone.
    storage = _CPU_STORAGE.get(kv_format, kv_format) if platform == "cpu" else kv_format
    return tuple(
        PageLayout(
            page_size=config.cache.page_size,
            num_kv_heads=config.model.num_kv_heads,
            head_size=config.model.head_size,
            num_pages=num_pages,
            kv_format=kv_format,
            storage=storage,
        )
        for num_pages in config.cache.num_pages
    )


def draft_layouts(config: EngineConfig, layouts: tuple[PageLayout, ...]) -> tuple[PageLayout, ...]:
    """The layouts of the pools of a draft model, one for each of its windows: pages as of full attention.

    Args:
        config: the model's that it drafts for.
        layouts: of the groups of that model.
    """
    if config.draft is None:
        return ()
    model = config.draft.model
    layout = dataclasses.replace(
        layouts[config.full_group], num_kv_heads=model.num_kv_heads, head_size=model.head_size
    )
    return (layout,) * len(model.windows)


def make_cache(config: EngineConfig, layouts: tuple[PageLayout, ...]) -> Cache:
    """Zeroed pools for every group."""
    number_of_stages = dict(config.mesh).get(PIPE, 1)
    places = layer_places(stages_of(config.model, number_of_stages).model)
    groups: list[CacheGroup] = []
    for number, layout in enumerate(layouts):
        num_layers = number_of_stages * sum(place.group == number for place in places)
        scales = jnp.zeros(layout.scales_shape(num_layers), jnp.float32) if layout.quantised else None
        groups.append(
            CacheGroup(
                pool=jnp.zeros(layout.pool_shape(num_layers), jnp.dtype(layout.storage)), scales=scales
            )
        )
    return tuple(groups)


def copy_page(group: CacheGroup, source: jax.Array, target: jax.Array, *, num_pages: int) -> CacheGroup:
    """A group with one page of every layer, scales included, copied onto another, in place."""

    def copy_rows(array: jax.Array) -> jax.Array:
        def copy_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
            first = layer * num_pages
            page = jax.lax.dynamic_slice_in_dim(array, first + source, 1)
            return jax.lax.dynamic_update_slice_in_dim(array, page, first + target, 0)

        return jax.lax.fori_loop(0, array.shape[0] // num_pages, copy_layer, array)

    return jax.tree.map(copy_rows, group)
