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
from jax.sharding import Mesh, NamedSharding

from jaxserve.config import EngineConfig
from jaxserve.engine import huge_pages
from jaxserve.engine.chain_drafts import DRAFT_PARAMETERS, read_known
from jaxserve.engine.iterations import run_iterations
from jaxserve.engine.ladder import chunk_shapes, decode_shapes, read_widths
from jaxserve.engine.mesh import mesh_of
from jaxserve.engine.page_moves import PageProgram, compile_page_programs
from jaxserve.engine.parameters import abstract_parameters
from jaxserve.engine.replicas import (
    ALL,
    OWN,
    make_replicas,
    of_all_replicas,
    on_mesh,
    packing_for,
    slot_program_of_replicas,
    step_of_replicas,
)
from jaxserve.engine.shardings import placed, shardings_of, state_shardings
from jaxserve.engine.slots import (
    PackedLoad,
    copy_pages,
    load_masks,
    load_slot,
    mask_widths,
    pack_reads,
)
from jaxserve.engine.state import DeviceState, make_state, mask_words
from jaxserve.engine.step import PlanFormat, run_step
from jaxserve.engine.ticks import run_tick
from jaxserve.engine.words import fed, spans_processes
from jaxserve.model.cache import page_layouts
from jaxserve.model.transformer import LayerLoop, Transformer
from jaxserve.plan import SamplingParams, SlotLoad, StepPlan, StepShape
from jaxserve.quantization import recipe_in_force
from pallas_kernels.dispatch import Target, choices_recorded, default_target
from sharding import DATA, replica_mesh

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


@dataclass(frozen=True)
class AbstractEngine:
    """What steps are lowered from: shapes, and on a mesh where they lie."""

    transformer: Transformer
    params: Any
    """A tree of ShapeDtypeStruct."""
    state: DeviceState
    """Likewise."""
    mesh: Mesh | None
    """All devices: those of the transformer, or of several replicas of it."""

    def lower(self, form: PlanFormat) -> jax.stages.Lowered:
        """The step of a plan's form."""
        mesh = self.mesh
        config = self.transformer.config
        whole = run_tick if form.shape.decode and config.decode_groups > 1 else run_step
        run, counts = (whole, ()) if form.max_iterations == 1 else (run_iterations, (np.int32(1),))
        step = functools.partial(run, self.transformer, form)
        nothing = packing_for(config).plan(form, StepPlan.of((), (), form.shape))
        specs = None
        if mesh is not None and config.num_replicas > 1:
            step, specs = step_of_replicas(step, self.params, self.state, len(counts), mesh)
        step, given = _taking(step, 2, (nothing, *counts), specs, mesh)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=_places(self.state, mesh))
        return jitted.lower(self.params, self.state, *given)

    def compile(self, form: PlanFormat) -> jax.stages.Compiled:
        """The same, for the devices at hand."""
        # XLA takes vectors of 256 bits unless told; no sum changes, and products of a row take 12 % less.
        is_row = form.shape.rows == 1 and self.transformer.target.platform == "cpu"
        options: dict[str, str | bool] | None = {"xla_cpu_prefer_vector_width": "512"} if is_row else None
        return self.lower(form).compile(compiler_options=options)


def abstract_engine(
    config: EngineConfig, layer_loop: LayerLoop, target: Target, mesh: Mesh | None
) -> AbstractEngine:
    """An engine of this config on such devices.

    Raises ValueError, naming the axis and the sizes, where the mesh does not divide an array.
    """
    layouts = page_layouts(config, target.platform)
    params = _abstract_parameters(config, layer_loop, mesh)
    state = abstract_state(config, target.platform, mesh)
    transformer = Transformer(config, layouts, layer_loop, replica_mesh(mesh), target)
    return AbstractEngine(transformer, params, state, mesh)


def abstract_state(config: EngineConfig, platform: str, mesh: Mesh | None) -> DeviceState:
    """The shapes of an engine's state, and on a mesh where they lie."""
    state = jax.eval_shape(functools.partial(make_state, config, page_layouts(config, platform)))
    if mesh is None:
        return state
    shapes = of_all_replicas(state, mesh) if config.num_replicas > 1 else state
    return placed(shapes, state_shardings(state, mesh))


def make_spread_state(config: EngineConfig) -> DeviceState:
    """An empty state, every part made where it lies."""
    platform, mesh = jax.default_backend(), mesh_of(config)
    make = functools.partial(make_state, config, page_layouts(config, platform))
    if mesh is None:
        state = jax.block_until_ready(make())
        if huge_pages.is_available():
            huge_pages.advise(state.cache)
        return state
    if config.num_replicas > 1:
        make = make_replicas(make, mesh)
    return jax.jit(make, out_shardings=shardings_of(abstract_state(config, platform, mesh)))()


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
    mesh = mesh_of(config)
    abstract = abstract_engine(config, layer_loop, target or default_target(), mesh)
    shapes = decode_shapes(config) + chunk_shapes(config)
    repeated = decode_shapes(config) if config.max_iterations > 1 else ()
    total = len(shapes) + len(repeated) + 1
    slots = _compile_slot_programs(config, abstract, mesh)
    pages = compile_page_programs(config, abstract.state, mesh) if config.moves_pages else ()
    on_progress(1, total)

    def compile_step(shape: StepShape, max_iterations: int) -> StepProgram:
        form = PlanFormat.of(config, shape, max_iterations)
        return StepProgram(form, abstract.compile(form))

    steps: dict[StepShape, StepProgram] = {}
    iterated: dict[StepShape, StepProgram] = {}
    with choices_recorded() as kernels:
        for shape in shapes:
            steps[shape] = compile_step(shape, 1)
            on_progress(1 + len(steps), total)
        for shape in repeated:
            iterated[shape] = compile_step(shape, config.max_iterations)
            on_progress(1 + len(steps) + len(iterated), total)
        reads = _compile_reads(abstract.transformer, abstract.params, abstract.state)
    logger.info("compiled or read %d steps in %.1f s", total - 1, time.monotonic() - started)
    return Programs(slots, steps, iterated, pages, reads, kernels)


def _abstract_parameters(config: EngineConfig, layer_loop: LayerLoop, mesh: Mesh | None) -> dict[str, Any]:
    """The shapes of all parameters, a draft model's included."""
    recipe = recipe_in_force(config)
    params = abstract_parameters(config.model, config.compute_format, layer_loop, recipe, mesh)
    if config.draft is not None:
        params[DRAFT_PARAMETERS] = _abstract_parameters(config.draft, layer_loop, mesh)
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


def _compile_slot_programs(config: EngineConfig, abstract: AbstractEngine, mesh: Mesh | None) -> SlotPrograms:
    """From the state's shapes; all together they take a fraction of a step's time to compile."""
    state, packing, num_pages = abstract.state, packing_for(config), config.cache.num_pages
    model_mesh = abstract.transformer.mesh
    programs: dict[str, Callable[..., DeviceState]] = {
        "load_slot": load_slot,
        "copy_pages": functools.partial(copy_pages, num_pages=num_pages, mesh=model_mesh),
        "load_masks": load_masks,
    }

    def compiled(name: str, *examples: object) -> Callable[..., DeviceState]:
        program, places = programs[name], None if mesh is None else shardings_of(state)
        specs = None
        if mesh is not None and config.num_replicas > 1:
            program, specs = slot_program_of_replicas(name, program, state, mesh)
        program, given = _taking(program, 1, examples, specs, mesh)
        jitted = jax.jit(program, donate_argnums=0, out_shardings=places)
        return jitted.lower(state, *given).compile()

    def masks(width: int) -> tuple[np.ndarray, ...]:
        words = mask_words(config.model.vocab_size)
        return packing.masks(np.zeros(width, np.int32), np.zeros((width, words), np.uint32), None)

    load = _example_load(config)
    return SlotPrograms(
        load_slot=compiled("load_slot", packing.load(load)),
        copy_pages=compiled("copy_pages", packing.copies(load)),
        load_masks={width: compiled("load_masks", *masks(width)) for width in mask_widths(config)},
    )


def _example_load(config: EngineConfig) -> SlotLoad:
    return SlotLoad(
        slot=0,
        tokens=(),
        num_prompt_tokens=0,
        num_computed=0,
        pages=((),) * len(config.model.windows),
        params=SamplingParams(),
        seed=0,
        sample_index=0,
    )


def _taking(
    program: Callable[..., Any], num_own: int, given: tuple[Any, ...], specs: Any, mesh: Mesh | None
) -> tuple[Callable[..., Any], Any]:
    """A program as it takes what the host has, and the shapes of that.

    Args:
        program: of `num_own` arguments that lie on the devices, and then of such.
        given: examples of these.
        specs: of each, for a program of replicas, which part each of them hears; None for others.
        mesh: the devices.
    """
    if specs is None or spans_processes(mesh):
        return fed(program, num_own, given, mesh)
    assert mesh is not None, "there are replicas"
    return program, on_mesh(given, specs, mesh)


def _places(state: DeviceState, mesh: Mesh | None) -> Any:
    """Where a step leaves the state, as it found it, and its result: whole on every device of a replica, and
    on all where a process has only some of the replicas."""
    if mesh is None:
        return None
    apart = DATA in mesh.axis_names and not spans_processes(mesh)
    return shardings_of(state), NamedSharding(mesh, OWN if apart else ALL)
