"""The layers as a pipeline inside one step: every stage of devices has a run of them, and their pages.

Rows pass through the stages in parts, so that all stages work at once: in each tick a stage takes a part
through its own layers and hands it on. Ticks are written out, not a loop: around the loop over layers it
would have the pools copied. A stage that has nothing to do in a tick computes padding.

Or a step is a single tick (`run_tick`), of which each stage has other rows, and what it hands on waits on
the device of the next stage for the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import LayerKind
from jaxserve.model.cache import CACHE_AXES, Cache
from jaxserve.model.rows import Rows, part_of_rows
from jaxserve.sizes import num_parts
from sharding import from_shard_before, num_shards, per_shard, shard_index, shard_sum

HANDED_AXES = ("stages", None, None)
"""Of what stages hand on, as it waits for the next tick."""

Ropes = dict[LayerKind, tuple[jax.Array, jax.Array]]
"""The rotary tables of the rows, by the part of a layer kind that they depend on."""
RunLayers = Callable[[Any, jax.Array, Cache, Rows, Ropes], tuple[jax.Array, Cache]]
"""Takes the parameters of the layers, hidden states, caches, rows and rotary tables."""


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model."""

    run_layers: RunLayers
    """Those of one stage."""
    layers: Any
    """The parameters of all stages' layers, as `Transformer` has them on a mesh with stages."""
    specs: Any
    """Where these lie, a tree of PartitionSpec."""
    mesh: Mesh
    """Has stages."""


def run_stages(
    pipeline: Pipeline,
    cache: Cache,
    x_TD: jax.Array,
    rows: Rows,
    ropes: Ropes,
    keep_R: jax.Array | None,
    *,
    platform: str,
    single: bool,
) -> tuple[jax.Array, Cache]:
    """Hidden states after the last stage, on all devices, and the caches with all stages' tokens written.

    Args:
        pipeline: the stages.
        cache, x_TD, rows: as of `Transformer.forward`.
        ropes: the rotary tables of all rows.
        keep_R: int32 the rows whose hidden states are wanted; None for all.
        platform: of the devices, by which rows are cut into parts.
        single: every sequence has exactly one row.
    """
    mesh, stages = pipeline.mesh, num_shards("stages", pipeline.mesh)
    # One row of each sequence costs the reading of all matrices, in however many parts.
    parts = 1 if single else num_parts(x_TD.shape[0], stages, platform)
    size = x_TD.shape[0] // parts

    def own(
        layers: Any, cache: Cache, x_TD: jax.Array, rows: Rows, ropes: Ropes, keep_R: jax.Array | None
    ) -> tuple[jax.Array, Cache]:
        stage, layers = shard_index("stages", mesh), _own_layers(layers)
        handed, done = jnp.zeros_like(x_TD[:size]), []
        for tick in range(parts + stages - 1):
            part = jnp.asarray(tick - stage, jnp.int32)
            if tick < parts:
                handed = jnp.where(stage == 0, x_TD[tick * size : (tick + 1) * size], handed)
            first = jnp.clip(part, 0, parts - 1) * size
            own_ropes = jax.tree.map(
                lambda table, first=first: jax.lax.dynamic_slice_in_dim(table, first, size), ropes
            )
            own_rows = part_of_rows(rows, part, parts, single=single)
            # Each tick by itself: for all of them at once, XLA on TPU brings a whole stack of matrices into
            # the layout that suits its loops (640 MiB of a 70B model's), where one loop takes it as it is.
            tick_layers, handed = jax.lax.optimization_barrier((layers, handed))
            x, cache = pipeline.run_layers(tick_layers, handed, cache, own_rows, own_ropes)
            done += [x] if tick >= stages - 1 else []
            if tick < parts + stages - 2:
                handed = from_shard_before(x, "stages", mesh)
        x_RD = jnp.concatenate(done) if keep_R is None else jnp.concatenate(done)[keep_R]
        return shard_sum(jnp.where(stage == stages - 1, x_RD, 0), "stages", mesh), cache

    axes = (pipeline.specs, CACHE_AXES, (), (), (), ())
    run = per_shard(own, mesh, in_axes=axes, out_axes=((), CACHE_AXES))
    return run(pipeline.layers, cache, x_TD, rows, ropes, keep_R)


def run_tick(
    pipeline: Pipeline,
    cache: Cache,
    x_SD: jax.Array,
    handed_NSD: jax.Array,
    rows: Rows,
    ropes: Ropes,
) -> tuple[jax.Array, jax.Array, Cache]:
    """One tick: each of the N stages takes a group of S sequences, one row each, through its layers.

    Args:
        pipeline: the stages.
        cache: as of `Transformer.forward`.
        x_SD: what the first stage takes.
        handed_NSD: what each stage has been handed by the one before, where it lies.
        rows: of the N groups, in the order of the stages.
        ropes: the rotary tables of these.

    Returns the hidden states that leave the last stage, on all devices; what is handed on, as `handed_NSD`;
    and the caches with each group's tokens written in the layers of its stage.
    """
    mesh, stages, size = pipeline.mesh, num_shards("stages", pipeline.mesh), x_SD.shape[0]

    def own(
        layers: Any, cache: Cache, x_SD: jax.Array, handed_1SD: jax.Array, rows: Rows, ropes: Ropes
    ) -> tuple[jax.Array, jax.Array, Cache]:
        stage = jnp.asarray(shard_index("stages", mesh), jnp.int32)
        own_rows = part_of_rows(rows, stage, stages, single=True)
        own_ropes = jax.tree.map(lambda table: jax.lax.dynamic_slice_in_dim(table, stage * size, size), ropes)
        x_SD = jnp.where(stage == 0, x_SD, handed_1SD[0])
        x_SD, cache = pipeline.run_layers(_own_layers(layers), x_SD, cache, own_rows, own_ropes)
        left_SD = shard_sum(jnp.where(stage == stages - 1, x_SD, 0), "stages", mesh)
        return left_SD, from_shard_before(x_SD, "stages", mesh)[None], cache

    axes = (pipeline.specs, CACHE_AXES, (), HANDED_AXES, (), ())
    run = per_shard(own, mesh, in_axes=axes, out_axes=((), HANDED_AXES, CACHE_AXES))
    return run(pipeline.layers, cache, x_SD, handed_NSD, rows, ropes)


def _own_layers(layers: Any) -> Any:
    """The parameters of this stage's layers, without the axis of stages that arrays of one layer have."""
    return jax.tree.map(
        lambda entry: tuple(array[0] for array in entry) if isinstance(entry, tuple) else entry,
        layers,
        is_leaf=lambda entry: isinstance(entry, tuple) and all(isinstance(one, jax.Array) for one in entry),
    )
