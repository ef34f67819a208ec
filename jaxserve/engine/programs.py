"""The compiled programs of an engine: one to fill a slot, one step for each shape of the ladder.

They are compiled from shapes alone, so that a model's weights can be read at the same time.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.ladder import chunk_shapes, decode_shapes
from jaxserve.engine.parameters import abstract_parameters
from jaxserve.engine.state import DeviceState, PackedLoad, load_slot, make_state, pack_load
from jaxserve.engine.step import PlanFormat, run_step
from jaxserve.model.cache import page_layouts
from jaxserve.model.transformer import LayerLoop, Params, Transformer
from jaxserve.plan import SamplingParams, SlotLoad, StepPlan, StepShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepProgram:
    """One rung of the ladder."""

    form: PlanFormat
    run: Callable[[Params, DeviceState, np.ndarray], tuple[DeviceState, jax.Array]]
    """Donates the state."""


@dataclass(frozen=True)
class Programs:
    """Everything that an engine runs."""

    load_slot: Callable[[DeviceState, PackedLoad], DeviceState]
    """Donates the state."""
    steps: Mapping[StepShape, StepProgram]


def compile_programs(
    config: EngineConfig,
    layer_loop: LayerLoop,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Programs:
    """Compile every program, or read it from the persistent compilation cache.

    Args:
        config: what to compile for.
        layer_loop: how the parameters will be placed.
        on_progress: called with the programs compiled so far and their total.
    """
    started = time.monotonic()
    layouts = page_layouts(config, jax.default_backend())
    transformer = Transformer(config, layouts, layer_loop)
    params = abstract_parameters(config.model, config.compute_format, layer_loop)
    state = jax.eval_shape(functools.partial(make_state, config, layouts))
    shapes = decode_shapes(config) + chunk_shapes(config)
    load = jax.jit(load_slot, donate_argnums=0).lower(state, _example_load(config)).compile()
    on_progress(1, len(shapes) + 1)
    steps: dict[StepShape, StepProgram] = {}
    for shape in shapes:
        form = PlanFormat(shape, len(layouts), config.num_slots, config.cache.page_size)
        step = functools.partial(run_step, transformer, form)
        vector = form.pack(StepPlan.of((), (), shape))
        compiled = jax.jit(step, donate_argnums=1).lower(params, state, vector).compile()
        steps[shape] = StepProgram(form, compiled)
        on_progress(len(steps) + 1, len(shapes) + 1)
    logger.info("compiled or read %d programs in %.1f s", len(steps) + 1, time.monotonic() - started)
    return Programs(load, steps)


def _example_load(config: EngineConfig) -> PackedLoad:
    load = SlotLoad(
        slot=config.num_slots,
        tokens=(),
        num_prompt_tokens=0,
        num_computed=0,
        pages=((),) * len(config.model.windows),
        params=SamplingParams(),
        seed=0,
        sample_index=0,
    )
    return pack_load(load, config)
