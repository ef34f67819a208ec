"""Compiling an engine's steps for a machine that is not here, from a model's configuration alone."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.build import (
    EngineOptions,
    layer_loop_for,
    resolve_config,
    resolve_dtype,
)
from jaxserve.engine.ladder import chunk_shapes, decode_shapes
from jaxserve.engine.parameters import abstract_parameters
from jaxserve.engine.pool_size import DEVICE_MEMORY_SHARE
from jaxserve.engine.shardings import parameter_shardings, state_shardings
from jaxserve.engine.state import make_state
from jaxserve.engine.step import PlanFormat, run_step
from jaxserve.model.cache import page_layouts
from jaxserve.model.transformer import Transformer
from jaxserve.plan import StepPlan, StepShape
from jaxserve.quantization import STORED, recipe_named
from pallas_kernels.dispatch import Target


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

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes


@dataclass(frozen=True)
class AheadEngine:
    """An engine of shapes, laid out over a machine's devices."""

    config: EngineConfig
    mesh: Mesh
    platform: str
    params: Any
    """A tree of ShapeDtypeStruct."""

    @property
    def weight_bytes(self) -> int:
        """Of one device."""
        return shard_bytes(self.params)

    @functools.cached_property
    def state(self) -> Any:
        """A tree of ShapeDtypeStruct."""
        layouts = page_layouts(self.config, self.platform)
        state = jax.eval_shape(functools.partial(make_state, self.config, layouts))
        return placed(state, state_shardings(state, self.mesh))

    @property
    def pool_bytes(self) -> int:
        """Of one device, scales included."""
        return shard_bytes(self.state.cache)

    def compile_steps(self) -> Iterator[StepReport]:
        """Every step of the ladder."""
        for shape in decode_shapes(self.config) + chunk_shapes(self.config):
            yield self._compile(shape)

    def _compile(self, shape: StepShape) -> StepReport:
        config, mesh = self.config, self.mesh
        layouts = page_layouts(config, self.platform)
        transformer = Transformer(
            config, layouts, layer_loop_for(self.platform), mesh, Target.of(mesh.devices.flat[0])
        )
        form = PlanFormat.of(config, shape)
        everywhere = NamedSharding(mesh, PartitionSpec())
        step = jax.jit(
            functools.partial(run_step, transformer, form),
            donate_argnums=1,
            out_shardings=(jax.tree.map(lambda x: x.sharding, self.state), everywhere),
        )
        vector = placed(form.pack(StepPlan.of((), (), shape)), everywhere)
        started = time.monotonic()
        compiled = step.lower(self.params, self.state, vector).compile()
        seconds = time.monotonic() - started
        memory = compiled.memory_analysis()
        assert memory is not None
        return StepReport(
            shape,
            seconds,
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.alias_size_in_bytes,
        )


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
        mesh: the devices, all along one axis.
        memory_bytes: of each device.
        decode_rows, chunk_rows: the ladder.

    Raises ValueError where the mesh does not divide the model, where the weights do not fit, and for weights
    as they are stored, which are not read.
    """
    if options.quantize == STORED:
        raise ValueError(f"quantize {STORED!r}: a config alone does not say how weights are stored")
    dtype = resolve_dtype(options, platform)
    recipe = recipe_named(options.quantize) if options.quantize else None
    params = abstract_parameters(model, dtype, layer_loop_for(platform), recipe)
    params = placed(params, parameter_shardings(params, model, mesh))
    free_bytes = int(DEVICE_MEMORY_SHARE * (memory_bytes - shard_bytes(params)))
    if free_bytes <= 0:
        raise ValueError(
            f"the weights take {shard_bytes(params)} bytes of a device that has {int(memory_bytes)}"
        )
    options = replace(options, kv_memory=options.kv_memory or free_bytes * mesh.size)
    length = options.max_model_len or model.max_position
    config = resolve_config(model, options, platform, dtype, length)
    return AheadEngine(
        replace(config, decode_rows=decode_rows, chunk_rows=chunk_rows), mesh, platform, params
    )


def placed(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes with the shardings of another."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def shard_bytes(tree: Any) -> int:
    """Of one device's parts of all arrays."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(tree)
    )
