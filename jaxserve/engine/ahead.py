"""Compiling an engine's steps for a machine that is not here, from a model's configuration alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.build import layer_loop_for, resolve_config, resolve_dtype
from jaxserve.engine.collectives import collectives
from jaxserve.engine.ladder import chunk_shapes, decode_shapes
from jaxserve.engine.memory import free_for_pages, shard_bytes, weight_bytes
from jaxserve.engine.mesh import num_pools
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.programs import AbstractEngine, abstract_engine
from jaxserve.engine.step import PlanFormat
from jaxserve.model.spread import shares_experts
from jaxserve.plan import StepShape
from jaxserve.quantization import STORED, recipe_named
from pallas_kernels.dispatch import Target
from sharding import num_shards


@dataclass(frozen=True)
class StepReport:
    """What the compiler says of one step; bytes are those of one device."""

    shape: StepShape
    compile_seconds: float
    argument_bytes: int
    """Weights, pool and the rest of the state."""
    temporary_bytes: int
    aliased_bytes: int
    """Of the arguments, what the step changes in place."""
    num_exchanges: int
    """Collectives of every step, those in branches that few steps take left out."""
    sent_bytes: int
    """That a device sends for them, by rings."""
    ideal_sent_bytes: int
    """The same for one sum of hidden states after each attention and each feed-forward part of its layers,
    for these to the experts of other replicas and back, and once to the next stage."""

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes


@dataclass(frozen=True)
class AheadEngine:
    """An engine of shapes, laid out over a machine's devices."""

    config: EngineConfig
    abstract: AbstractEngine
    num_devices: int

    @property
    def weight_bytes(self) -> int:
        """Of one device."""
        return shard_bytes(self.abstract.params)

    @property
    def pool_bytes(self) -> int:
        """Of one device, scales included."""
        return shard_bytes(self.abstract.state.cache)

    def compile_steps(self) -> Iterator[StepReport]:
        """Every step of the ladder."""
        for shape in decode_shapes(self.config) + chunk_shapes(self.config):
            yield self._compile(shape)

    def _compile(self, shape: StepShape) -> StepReport:
        started = time.monotonic()
        compiled = self.abstract.lower(PlanFormat.of(self.config, shape)).compile()
        seconds = time.monotonic() - started
        memory = compiled.memory_analysis()
        assert memory is not None
        told = collectives(compiled.as_text() or "")
        always = {one: times for one, times in told.items() if not one.conditional}
        return StepReport(
            shape,
            seconds,
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.alias_size_in_bytes,
            sum(always.values()),
            int(sum(one.moved_bytes * times for one, times in always.items())),
            self._ideal_sent_bytes(shape),
        )

    def _ideal_sent_bytes(self, shape: StepShape) -> int:
        model, mesh = self.config.model, self.abstract.transformer.mesh
        item_bytes = 2 if self.config.compute_format == "bfloat16" else 4
        shares = [(count - 1) / count for count in (num_shards("kv_heads", mesh), num_shards("mlp", mesh))]
        stages = num_shards("stages", mesh)
        sums = 2 * sum(shares) * model.num_layers / stages
        if shares_experts(self.config):
            # To the experts of the other replicas and back.
            sums += 2 * (self.config.num_replicas - 1) * sum(kind.experts for kind in model.layers) / stages
        return int((sums + (stages - 1) / stages) * shape.rows * model.hidden_size * item_bytes)


def prepare_ahead(
    model: ModelConfig,
    options: EngineOptions,
    mesh: Mesh,
    platform: str,
    memory_bytes: float,
    decode_rows: tuple[int, ...],
    chunk_rows: tuple[int, ...],
) -> AheadEngine:
    """Lay out weights and pool as `build_engine` would on such devices.

    Args:
        options: as for `build_engine`; `kv_memory` is that of all devices together, by default 90 % of what
            the weights leave.
        mesh: the devices.
        memory_bytes: of each device.
        decode_rows, chunk_rows: the ladder; of a decode group no more than it can have.

    Raises ValueError where the mesh does not divide the model, where the weights do not fit, and for weights
    as they are stored, which are not read.
    """
    if options.quantize == STORED:
        raise ValueError(f"quantize {STORED!r}: a config alone does not say how weights are stored")
    axes = tuple((str(axis), size) for axis, size in mesh.shape.items() if size > 1)
    dtype = resolve_dtype(options, platform)
    recipe = recipe_named(options.quantize) if options.quantize else None
    target = Target.of(mesh.devices.flat[0])
    layer_loop = layer_loop_for(target, spread=bool(axes))
    weights = weight_bytes(model, dtype, layer_loop, recipe, axes)
    free_bytes = free_for_pages(int(memory_bytes), weights)
    options = replace(options, kv_memory=options.kv_memory or free_bytes * num_pools(axes))
    length = options.max_model_len or model.max_position
    config = resolve_config(model, options, platform, dtype, length, axes)
    decode_rows = tuple(sorted({min(rows, config.slots_of_group) for rows in decode_rows}))
    config = replace(config, decode_rows=decode_rows, chunk_rows=chunk_rows)
    abstract = abstract_engine(config, layer_loop, target, mesh)
    return AheadEngine(config, abstract, mesh.size)
