"""From a checkpoint and a user's options to a running engine: everything "auto" is decided here."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax

from jaxserve.config import CacheConfig, EngineConfig, FloatFormat, KvFormat, ModelConfig
from jaxserve.engine.chain_drafts import DRAFT_PARAMETERS, resolve_draft_layers
from jaxserve.engine.compile_cache import compile_counter, enable_compilation_cache
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.loading import named_parameters, reported, stored_as
from jaxserve.engine.memory import free_for_pages, free_memory, return_freed_memory, weight_bytes
from jaxserve.engine.mesh import mesh_of, num_pools, resolve_mesh, slots_of_each, spread_model
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.parameters import place_parameters
from jaxserve.engine.pool_size import resolve_pages
from jaxserve.engine.prefill import check_prefill, for_prompts, prefill_options, told_apart, with_counterpart
from jaxserve.engine.processes import join_engine
from jaxserve.engine.programs import compile_programs
from jaxserve.engine.state import MAX_EOS_IDS
from jaxserve.model.cache import page_layouts
from jaxserve.model.transformer import LayerLoop, Params
from jaxserve.quantization import STORED, recipe_in_force, recipe_named, recipe_of_label
from jaxserve.sizes import DRAFT_ROWS, chunk_ladder, default_sizes, ladder
from jaxserve.speculation import read_speculative
from jaxserve.weights import AnyCheckpoint, Checkpoint, cache_home
from pallas_kernels import native
from pallas_kernels.dispatch import Target, default_target
from pallas_kernels.ragged_paged_attention import reads_pages_natively
from sharding import DATA, PIPE, MeshAxes, mesh_name, mesh_size, parse_mesh

LOGGER = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called, from either of two threads, with "load" or "compile", what is done so far, and the total; after
"prefill " for what computes prompts apart."""

SHAPE_INVARIANT_ROWS = 4
"""Fewest of a step in the shape-invariant mode, unless products are exact: XLA on CPU multiplies a single row
with another kernel, in another order, than two or more."""


def build_engine(
    checkpoint: AnyCheckpoint,
    options: EngineOptions,
    *,
    draft: AnyCheckpoint | None = None,
    params: Params | None = None,
    on_progress: Progress = lambda stage, done, total: None,
) -> DeviceEngine:
    """Load a model and compile its steps.

    In a job of several processes every one calls this. It returns in the first when all are ready; the others
    run what that runs, and end with it: see `jaxserve.engine.processes`.

    Args:
        checkpoint: the model.
        options: how it runs.
        draft: the model that drafts, where the options say that one does.
        params: the model's parameters if `load_parameters` has read them.
        on_progress: hears how far it is.

    Raises ValueError, naming the value and the limit, for options that the model or the machine cannot meet.
    """
    config = configure(checkpoint, options, draft, loaded=params is not None)
    engine = _build(checkpoint, config, draft, params, on_progress)
    if options.prefill_mesh is not None:
        own = configure(checkpoint, prefill_options(options, config), first_device=mesh_size(config.mesh))
        engine.prefill = _build(checkpoint, own, None, None, told_apart(on_progress))
    return engine


def _build(
    checkpoint: AnyCheckpoint,
    config: EngineConfig,
    draft: AnyCheckpoint | None,
    params: Params | None,
    on_progress: Progress,
) -> DeviceEngine:
    target = local_target()
    layer_loop = layer_loop_for(target, spread=bool(config.mesh))
    # Programs are compiled from shapes alone, so the weights are read meanwhile.
    with ThreadPoolExecutor(1, "jaxserve-load") as pool:
        loaded = pool.submit(_load_all, checkpoint, draft, config, params, on_progress)
        programs = compile_programs(
            config,
            layer_loop,
            target=target,
            on_progress=lambda done, total: on_progress("compile", done, total),
        )
        return join_engine(config, loaded.result(), programs, checkpoint.fingerprint)


def _load_all(
    checkpoint: AnyCheckpoint,
    draft: AnyCheckpoint | None,
    config: EngineConfig,
    params: Params | None,
    on_progress: Progress,
) -> Params:
    """The parameters, a draft model's among them."""
    params = params or load_parameters(checkpoint, config, on_progress)
    if draft is None or config.draft is None:
        return params
    return {**params, DRAFT_PARAMETERS: load_parameters(draft, config.draft)}


def local_target() -> Target:
    """The device at hand, its own kernels made known to it."""
    target = default_target()
    if target.platform != "cpu":
        return target
    failure = native.load(cache_home() / "native")
    if failure:
        LOGGER.info("kernels for this CPU are XLA's: %s", failure)
    return replace(target, native=failure is None)


def configure(
    checkpoint: AnyCheckpoint,
    options: EngineOptions,
    draft: AnyCheckpoint | None = None,
    *,
    loaded: bool = False,
    first_device: int = 0,
) -> EngineConfig:
    """What an engine of these options compiles against, on this machine; its compilation cache is ready then.

    Args:
        checkpoint: the model.
        options: how it runs.
        draft: the model that drafts, where the options say that one does.
        loaded: whether the weights lie on the devices already.
        first_device: of an engine that computes prompts for another, the devices that the other has.

    Raises ValueError, naming the value and the limit, for options that the model or the machine cannot meet.
    """
    enable_compilation_cache(cache_home() / "compiled")
    compile_counter()
    model, platform, num_devices = checkpoint.config, jax.default_backend(), jax.device_count()
    options = _with_recipe(options, checkpoint)

    def resolved(options: EngineOptions) -> EngineConfig:
        config = resolve_here(model, options, draft.config if draft else None)
        if draft is not None:
            assert config.draft is not None, "it has been given one"
            config = replace(config, draft=_drafting_config(config.draft, draft, options))
        return stored_as(config, checkpoint, options.quantize)

    def own_weights(axes: MeshAxes) -> int:
        config = resolved(replace(options, mesh=None, num_pages=2))
        loop = layer_loop_for(default_target(), spread=bool(axes))
        return sum(
            weight_bytes(one.model, one.compute_format, loop, recipe_in_force(one), axes)
            for one in (config, config.draft)
            if one is not None
        )

    free = functools.partial(free_memory, platform, first_device=first_device)
    num_processes = jax.process_count()
    axes = resolve_mesh(
        options.mesh,
        model,
        num_devices,
        platform,
        lambda: free(num_devices),
        own_weights,
        num_processes,
        options.can_repeat if draft is None else None,  # A draft model runs on one device.
    )
    if options.prefill_mesh is not None:
        check_prefill(options, axes, model, num_devices, platform, num_processes)
    if draft is not None and mesh_size(axes) > 1:
        raise ValueError(
            f"speculative {options.speculative!r} on {mesh_size(axes)} devices ({mesh_name(axes)}): "
            "a draft model runs on one"
        )
    options = replace(options, mesh=mesh_name(axes))
    if platform != "cpu" and options.kv_memory is None and options.num_pages is None:
        own_pool = free_for_pages(free(mesh_size(axes)), 0 if loaded else own_weights(axes))
        options = replace(options, kv_memory=own_pool * num_pools(axes))
    config = resolved(options)
    if first_device:
        return for_prompts(config, first_device)
    return config if options.prefill_mesh is None else with_counterpart(config)


def _drafting_config(config: EngineConfig, draft: AnyCheckpoint, options: EngineOptions) -> EngineConfig:
    """The config of a draft model, with the formats of its own weights.

    Without `draft_quantize` it is quantised as the model is, unless it has been already.
    """
    own = replace(options, quantize=options.draft_quantize)
    if options.draft_quantize is None and (isinstance(draft, Checkpoint) or draft.recipe is None):
        own = options
    own = _with_recipe(own, draft)
    dtype = resolve_dtype(own, jax.default_backend())
    return stored_as(replace(config, recipe=_resolve_recipe(own), compute_format=dtype), draft, own.quantize)


def resolve_here(
    model: ModelConfig, options: EngineOptions, draft: ModelConfig | None = None
) -> EngineConfig:
    """Every size that an engine on this machine compiles against, and its numerics; `draft` as of
    `resolve_config`.

    Raises ValueError, naming the value and the limit, for options that the model or the machine cannot meet.
    """
    platform = jax.default_backend()
    wants_draft = bool(options.speculative and read_speculative(options.speculative).model)
    if wants_draft != (draft is not None):
        need = "needs the draft model opened too" if wants_draft else "has no use for a draft model"
        raise ValueError(f"speculative {options.speculative!r} {need}")
    dtype, max_model_len = resolve_dtype(options, platform), _resolve_max_model_len(options, model, draft)
    axes = parse_mesh(options.mesh) if options.mesh else ()
    config = resolve_config(model, options, platform, dtype, max_model_len, axes, draft)
    if options.deterministic is None and options.prefill_mesh is None and _is_invariant_for_nothing(config):
        wanted = replace(options, deterministic=True)
        return resolve_config(model, wanted, platform, dtype, max_model_len, axes, draft)
    return config


def _is_invariant_for_nothing(config: EngineConfig) -> bool:
    """Whether shape-invariant numerics are as fast as others with this config, on this machine."""
    if config.mesh or config.max_iterations > 1 or not _has_exact_products(config.model, config.recipe):
        return False
    target = local_target()
    layouts = page_layouts(config, target.platform)
    return target.native and all(reads_pages_natively(layout) for layout in layouts)


def load_parameters(
    checkpoint: AnyCheckpoint, config: EngineConfig, on_progress: Progress = lambda stage, done, total: None
) -> Params:
    """A model's parameters on the devices, as the programs for this config take them."""
    mesh = mesh_of(config)
    named = named_parameters(checkpoint, config, mesh)
    named = reported(named, config.model, lambda done, total: on_progress("load", done, total))
    layer_loop = layer_loop_for(local_target(), spread=mesh is not None)
    params = place_parameters(named, config.model, layer_loop, mesh)
    jax.block_until_ready(params)
    return_freed_memory()
    return params


def resolve_config(
    model: ModelConfig,
    options: EngineOptions,
    platform: str,
    dtype: FloatFormat,
    max_model_len: int,
    mesh: MeshAxes = (),
    draft: ModelConfig | None = None,
) -> EngineConfig:
    """Every size that the engine compiles against, whatever mesh the options name. `draft` is the model that
    drafts, if one does; whatever is its own, beside its pools, is as for `model` still."""
    model = spread_model(model, mesh)
    if len(model.eos_token_ids) > MAX_EOS_IDS:
        raise ValueError(f"{len(model.eos_token_ids)} end-of-sequence ids; the limit is {MAX_EOS_IDS}")
    on_cpu = platform == "cpu"
    sizes = default_sizes(on_cpu=on_cpu)
    num_replicas = dict(mesh).get(DATA, 1)
    if num_replicas > 1 and options.host_kv_memory is not None:
        raise ValueError(f"host_kv_memory on mesh {mesh_name(mesh)}: it works without {DATA!r}")
    num_slots = slots_of_each(options.num_slots or sizes.num_slots * num_replicas, mesh)
    page_size = options.page_size or sizes.page_size
    max_chunk = options.max_chunk or sizes.max_chunk
    kv_format: KvFormat = dtype if options.kv_format == "auto" else options.kv_format
    fewest, decode_groups = _fewest_rows(model, options), _resolve_groups(options, mesh)
    num_pages = resolve_pages(
        model,
        platform,
        kv_format=kv_format,
        page_size=page_size,
        num_slots=num_slots,
        max_model_len=max_model_len,
        step_rows=max_chunk + num_slots,
        num_pages=options.num_pages,
        kv_memory=options.kv_memory,
        draft=draft,
        num_stages=dict(mesh).get(PIPE, 1),
        num_replicas=num_replicas,
    )
    config = EngineConfig(
        model=model,
        cache=CacheConfig(page_size=page_size, num_pages=num_pages, kv_format=kv_format),
        max_model_len=max_model_len,
        num_slots=num_slots,
        decode_rows=ladder(fewest, -(-num_slots // decode_groups)),
        chunk_rows=_chunk_rows(options, fewest, num_slots, max(max_chunk, num_slots), on_cpu=on_cpu),
        compute_format=dtype,
        recipe=_resolve_recipe(options),
        max_logprobs=min(options.max_logprobs, model.vocab_size),
        logprobs_mode=options.logprobs_mode,
        deterministic=bool(options.deterministic),
        context_block=max(128, page_size),
        max_iterations=options.max_iterations,
        decode_groups=decode_groups,
        max_drafts=options.max_drafts if options.speculative else 0,
        draft_layers=resolve_draft_layers(options.speculative, model, mesh),
        moves_pages=options.host_kv_memory is not None,
        mesh=mesh,
    )
    return config if draft is None else config.drafted_by(draft)


def _fewest_rows(model: ModelConfig, options: EngineOptions) -> int:
    """Rows of the smallest step."""
    if not options.deterministic:
        return 1
    return 1 if _has_exact_products(model, options.quantize) else SHAPE_INVARIANT_ROWS


def _has_exact_products(model: ModelConfig, quantize: str | None) -> bool:
    """Whether a recipe has all of a model's products summed as integers: in any order, to the same bits."""
    # Routers multiply floats in any recipe.
    return quantize is not None and recipe_named(quantize).sums_integers and not model.num_experts


def _chunk_rows(
    options: EngineOptions, fewest: int, num_slots: int, longest: int, *, on_cpu: bool
) -> tuple[int, ...]:
    """Rows of the steps that take chunks of prompts or verify drafts, and in the shape-invariant mode of all
    steps."""
    if options.deterministic and fewest > 1:
        return ladder(fewest, longest)
    single = ladder(fewest, num_slots) if options.deterministic else ()
    drafts = () if options.speculative is None else (rows for rows in DRAFT_ROWS if rows < longest)
    return tuple(sorted({*single, *drafts, *chunk_ladder(num_slots, longest, on_cpu=on_cpu)}))


def _resolve_groups(options: EngineOptions, mesh: MeshAxes) -> int:
    """Groups that decode in turn; whether they can is checked where the config is made."""
    if options.decode_groups is not None:
        return options.decode_groups
    needs_all = options.speculative or options.max_iterations > 1 or options.deterministic
    needs_all = needs_all or options.prefill_mesh is not None
    return 1 if needs_all else dict(mesh).get(PIPE, 1)


def layer_loop_for(target: Target, *, spread: bool = False) -> LayerLoop:
    """How a device likes its parameters stored. `spread`: over a mesh."""
    if target.platform == "cpu":
        return "indexed" if target.native and not spread else "switched"
    return "stacked" if target.platform == "tpu" else "unrolled"


def resolve_dtype(options: EngineOptions, platform: str) -> FloatFormat:
    """Of activations, and of weights that no recipe quantises.

    Raises ValueError where `dtype` and the recipe name different ones.
    """
    recipe = recipe_named(options.quantize) if options.quantize else None
    wanted = recipe.compute_format if recipe else None
    if options.dtype == "auto":
        return wanted or ("float32" if platform == "cpu" else "bfloat16")
    if wanted not in (None, options.dtype):
        raise ValueError(
            f"quantize {options.quantize!r} computes in {wanted}, and dtype is {options.dtype!r}"
        )
    return options.dtype


def _with_recipe(options: EngineOptions, checkpoint: AnyCheckpoint) -> EngineOptions:
    """The options with the recipe that the parameters have been quantised with, if they have.

    Raises ValueError where the options ask for another.
    """
    if isinstance(checkpoint, Checkpoint) or checkpoint.recipe is None:
        return options
    name = recipe_of_label(checkpoint.recipe, checkpoint.stored_formats).name
    if options.quantize not in (None, STORED, name):
        raise ValueError(
            f"quantize {options.quantize!r}, but {checkpoint.path} has been quantised as {name!r}; "
            "name the model that it was made from"
        )
    # A recipe that came with the source is none that could be asked for.
    return replace(options, quantize=None if checkpoint.stored_formats else name)


def _resolve_recipe(options: EngineOptions) -> str | None:
    """The recipe in force: None for one that quantises nothing."""
    return options.quantize if options.quantize and recipe_named(options.quantize).rules else None


def _resolve_max_model_len(options: EngineOptions, model: ModelConfig, draft: ModelConfig | None) -> int:
    longest = model.max_position if draft is None else min(model.max_position, draft.max_position)
    length = options.max_model_len or longest
    if not 2 <= length <= longest:
        which = "the model takes" if longest == model.max_position else "the draft model takes"
        raise ValueError(f"max_model_len {length} is out of range: {which} 2 to {longest}")
    return length
