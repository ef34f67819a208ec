"""The compiled programs of an engine: a few small ones to fill slots, one step for each shape of the ladder.

They are compiled from shapes alone, so that a model's weights can be read at the same time.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.chain_drafts import DRAFT_PARAMETERS, read_known
from jaxserve.engine.iterations import run_iterations
from jaxserve.engine.ladder import chunk_shapes, decode_shapes, read_widths
from jaxserve.engine.page_moves import PageProgram, compile_page_programs
from jaxserve.engine.parameters import abstract_parameters
from jaxserve.engine.slots import (
    PackedLoad,
    copy_pages,
    load_masks,
    load_slot,
    mask_widths,
    pack_copies,
    pack_load,
    pack_masks,
    pack_reads,
)
from jaxserve.engine.state import DeviceState, make_state, mask_words
from jaxserve.engine.step import PlanFormat, run_step
from jaxserve.model.cache import page_layouts
from jaxserve.model.transformer import LayerLoop, Transformer
from jaxserve.plan import SamplingParams, SlotLoad, StepPlan, StepShape
from jaxserve.quantization import recipe_in_force
from pallas_kernels.dispatch import Target, choices_recorded, default_target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepProgram:
    """One rung of the ladder."""

    form: PlanFormat
    run: Callable[..., tuple[DeviceState, jax.Array]]
    """Of parameters, state and the plan's vector; and of the number of iterations where there can be
    several. Donates the state."""


@dataclass(frozen=True)
class SlotPrograms:
    """What prepares slots between steps. Each donates the state."""

    load_slot: Callable[[DeviceState, PackedLoad], DeviceState]
    copy_pages: Callable[[DeviceState, np.ndarray], DeviceState]
    load_masks: Mapping[int, Callable[..., DeviceState]]
    """By their number, padding included; of what `pack_masks` returns."""


@dataclass(frozen=True)
class Programs:
    """Everything that an engine runs."""

    slots: SlotPrograms
    steps: Mapping[StepShape, StepProgram]
    iterated: Mapping[StepShape, StepProgram]
    """Decode shapes for several iterations, if the engine is made for them."""
    pages: tuple[PageProgram, ...] = ()
    """For each cache group what moves its pages, if the engine is made for that."""
    reads: Mapping[int, Callable[..., DeviceState]] = field(default_factory=dict[int, Any])
    """By the most tokens what has a draft model read known ones: of its parameters, the state, which is
    donated, and what `pack_reads` returns. Empty without one."""
    kernels: Mapping[str, str] = field(default_factory=dict[str, str])
    """By operation the implementations that the steps were compiled with."""


def compile_programs(
    config: EngineConfig,
    layer_loop: LayerLoop,
    *,
    target: Target | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Programs:
    """Compile every program, or read it from the persistent compilation cache.

    Args:
        config: what to compile for.
        layer_loop: how the parameters will be placed.
        target: the device, for which kernels are chosen; by default jax's own.
        on_progress: called with the programs compiled so far and their total.
    """
    started = time.monotonic()
    layouts = page_layouts(config, jax.default_backend())
    transformer = Transformer(config, layouts, layer_loop, target=target or default_target())
    params = _abstract_parameters(config, layer_loop)
    state = jax.eval_shape(functools.partial(make_state, config, layouts))
    shapes = decode_shapes(config) + chunk_shapes(config)
    repeated = decode_shapes(config) if config.max_iterations > 1 else ()
    total = len(shapes) + len(repeated) + 1
    slots = _compile_slot_programs(config, state)
    pages = compile_page_programs(config, state) if config.moves_pages else ()
    on_progress(1, total)

    def compile_step(shape: StepShape, max_iterations: int) -> StepProgram:
        form = PlanFormat.of(config, shape, max_iterations)
        run, counts = (run_step, ()) if max_iterations == 1 else (run_iterations, (np.int32(1),))
        step = functools.partial(run, transformer, form)
        vector = form.pack(StepPlan.of((), (), shape))
        return StepProgram(
            form, jax.jit(step, donate_argnums=1).lower(params, state, vector, *counts).compile()
        )

    steps: dict[StepShape, StepProgram] = {}
    iterated: dict[StepShape, StepProgram] = {}
    with choices_recorded() as kernels:
        for shape in shapes:
            steps[shape] = compile_step(shape, 1)
            on_progress(1 + len(steps), total)
        for shape in repeated:
            iterated[shape] = compile_step(shape, config.max_iterations)
            on_progress(1 + len(steps) + len(iterated), total)
        reads = _compile_reads(transformer, params, state)
    logger.info("compiled or read %d steps in %.1f s", total - 1, time.monotonic() - started)
    return Programs(slots, steps, iterated, pages, reads, kernels)


def _abstract_parameters(config: EngineConfig, layer_loop: LayerLoop) -> dict[str, Any]:
    """The shapes of all parameters, a draft model's included."""
    params = abstract_parameters(config.model, config.compute_format, layer_loop, recipe_in_force(config))
    if config.draft is not None:
        params[DRAFT_PARAMETERS] = _abstract_parameters(config.draft, layer_loop)
    return params


def _compile_reads(
    transformer: Transformer, params: dict[str, Any], state: DeviceState
) -> dict[int, Callable[..., DeviceState]]:
    config = transformer.config
    if config.draft is None:
        return {}
    nothing = pack_reads(None, config)
    return {
        num_rows: jax.jit(functools.partial(read_known, transformer, num_rows), donate_argnums=1)
        .lower(params[DRAFT_PARAMETERS], state, nothing)
        .compile()
        for num_rows in read_widths(config)
    }


def _compile_slot_programs(config: EngineConfig, state: DeviceState) -> SlotPrograms:
    """From the state's shapes; all together they take a fraction of a step's time to compile."""
    num_pages = config.cache.num_pages

    def compiled(program: Callable[..., DeviceState], *examples: object) -> Callable[..., DeviceState]:
        return jax.jit(program, donate_argnums=0).lower(state, *examples).compile()

    def masks(width: int) -> tuple[np.ndarray, ...]:
        words = mask_words(config.model.vocab_size)
        return pack_masks(np.zeros(width, np.int32), np.zeros((width, words), np.uint32), None, config)

    return SlotPrograms(
        load_slot=compiled(load_slot, _example_load(config)),
        copy_pages=compiled(functools.partial(copy_pages, num_pages=num_pages), pack_copies((), num_pages)),
        load_masks={width: compiled(load_masks, *masks(width)) for width in mask_widths(config)},
    )


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
