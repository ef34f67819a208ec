"""From a checkpoint and a user's options to a running engine: everything "auto" is decided here."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import jax

from jaxserve.config import CacheConfig, EngineConfig, FloatFormat, KvFormat, LogprobsMode, ModelConfig
from jaxserve.engine.compile_cache import compile_counter, enable_compilation_cache
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.loading import named_parameters, reported, stored_as
from jaxserve.engine.memory import default_pool, free_for_pages, free_memory, weight_bytes
from jaxserve.engine.mesh import AUTO, resolve_mesh, spread_model
from jaxserve.engine.parameters import place_parameters
from jaxserve.engine.programs import compile_programs
from jaxserve.engine.state import MAX_EOS_IDS
from jaxserve.model.cache import page_layouts
from jaxserve.model.transformer import LayerLoop, Params
from jaxserve.quantization import STORED, recipe_in_force, recipe_named, recipe_of_label
from jaxserve.sizes import DRAFT_ROWS, default_sizes, ladder, lowest_chunk
from jaxserve.speculation import DEFAULT_MAX_DRAFTS, read_speculative
from jaxserve.weights import AnyCheckpoint, Checkpoint, cache_home
from pallas_kernels import native
from pallas_kernels.dispatch import Target, default_target
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention import reads_pages_natively
from sharding import TENSOR, MeshAxes, make_mesh, mesh_name, mesh_size, parse_mesh

LOGGER = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called, from either of two threads, with "load" or "compile", what is done so far, and the total."""

SHAPE_INVARIANT_ROWS = 4
"""Fewest of a step in the shape-invariant mode, unless products are exact: XLA on CPU multiplies a single row
with another kernel, in another order, than two or more."""

_SIZES = ("max_model_len", "num_slots", "page_size", "kv_memory", "host_kv_memory", "num_pages", "max_chunk")
_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "kv_format": ("auto", *get_args(KvFormat)),
    "logprobs_mode": ("raw", "processed"),
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a user may choose; None and "auto" are chosen from the model and the machine."""

    max_model_len: int | None = None
    """Longest sequence in tokens; by default the model's own limit."""
    num_slots: int | None = None
    """Sequences that can run at once; by default 16 on CPU, 64 elsewhere."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; float32 on CPU, bfloat16 elsewhere."""
    quantize: str | None = None
    """Recipe of the weights, see `jaxserve.quantization.recipe_named`; None keeps them in `dtype`, or as the
    checkpoint stores them if it is quantised already. "f32" or "bf16" widens such weights; blocks of GGUF are
    widened to `dtype` on CPU, where it is quicker, unless "stored" keeps them."""
    kv_format: Literal["auto", "float32", "bfloat16", "int8", "float8_e4m3fn"] = "auto"
    """Of the KV pool; by default as `dtype`."""
    page_size: int | None = None
    """Tokens on a page; by default 16 on CPU, 64 elsewhere."""
    kv_memory: int | None = None
    """Bytes of the KV pool, of all devices together; by default at most 1 GiB on CPU, elsewhere
    90 % of what the weights leave."""
    host_kv_memory: int | None = None
    """Bytes of the host's memory that keep what the KV pool has no room for; by default none. Needs prefix
    caching."""
    num_pages: int | None = None
    """Pages of each cache group instead."""
    max_chunk: int | None = None
    """Rows of the largest step; by default 256 on CPU, 1024 elsewhere."""
    deterministic: bool | None = None
    """Shape-invariant numerics: a row's logits are bitwise the same whatever shares its step. By default
    where that costs nothing: on CPU with its own kernels, in a recipe that sums integers (`int8`)."""
    logprobs_mode: LogprobsMode = "raw"
    """Log-probabilities of the model itself, or of the distribution that was sampled from."""
    max_logprobs: int = 20
    """Most alternatives that a request may ask for at each position."""
    max_iterations: int = 1
    """Tokens of each sequence that one decode step may compute while no one waits; above 1 decode steps are
    compiled twice."""
    speculative: str | None = None
    """What drafts answers, for a step to verify several tokens at once; answers are the same. "ngram": their
    own text; "skip:N": the model's first N layers; None drafts nothing."""
    max_drafts: int = DEFAULT_MAX_DRAFTS
    """Most drafts of an answer in a step."""
    mesh: str | None = None
    """Devices that share the model: `tensor=N`, `expert=N`, both with a comma, or "auto", the fewest on which
    weights leave as much memory to pages; None takes the first device."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} {value!r} is not a whole number from 1 up")
        for name in ("max_logprobs", "max_iterations", "max_drafts"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r} is not a whole number from 1 up")
        if self.speculative is not None:
            try:
                read_speculative(self.speculative)
            except ValueError as error:
                raise ValueError(f"speculative {error}") from error
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(map(str, known))}")
        if self.quantize is not None:
            recipe_named(self.quantize)
        if self.mesh not in (None, AUTO):
            parse_mesh(self.mesh)


def engine_options(settings: Mapping[str, Any]) -> EngineOptions:
    """Options from keyword arguments. Raises TypeError, listing the options, for one that does not exist."""
    known = [option.name for option in fields(EngineOptions)]
    for name in settings:
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}; the options are {', '.join(known)}")
    return EngineOptions(**settings)


def build_engine(
    checkpoint: AnyCheckpoint,
    options: EngineOptions,
    *,
    params: Params | None = None,
    on_progress: Progress = lambda stage, done, total: None,
) -> DeviceEngine:
    """Load a model and compile its steps. `params` are its parameters if `load_parameters` has read them.

    Raises ValueError, naming the value and the limit, for options that the model or the machine cannot meet.
    """
    config = configure(checkpoint, options, loaded=params is not None)
    layer_loop = layer_loop_for(jax.default_backend())
    # Programs are compiled from shapes alone, so the weights are read meanwhile.
    with ThreadPoolExecutor(1, "jaxserve-load") as pool:
        loaded = pool.submit(lambda: params or load_parameters(checkpoint, config, on_progress))
        programs = compile_programs(
            config,
            layer_loop,
            target=local_target(),
            on_progress=lambda done, total: on_progress("compile", done, total),
        )
        return DeviceEngine(config, loaded.result(), programs)


def local_target() -> Target:
    """The device at hand, its own kernels made known to it."""
    target = default_target()
    if target.platform != "cpu":
        return target
    failure = native.load(cache_home() / "native")
    if failure:
        LOGGER.info("kernels for this CPU are XLA's: %s", failure)
    return replace(target, native=failure is None)


def configure(checkpoint: AnyCheckpoint, options: EngineOptions, *, loaded: bool = False) -> EngineConfig:
    """What an engine of these options compiles against, on this machine; its compilation cache is ready then.

    `loaded` says that the weights lie on the devices already.

    Raises ValueError, naming the value and the limit, for options that the model or the machine cannot meet.
    """
    enable_compilation_cache(cache_home() / "compiled")
    compile_counter()
    model, platform, num_devices = checkpoint.config, jax.default_backend(), jax.device_count()
    options = _with_recipe(options, checkpoint)

    def resolved(options: EngineOptions) -> EngineConfig:
        return stored_as(resolve_here(model, options), checkpoint, options.quantize)

    def own_weights(axes: MeshAxes) -> int:
        config = resolved(replace(options, mesh=None, num_pages=2))
        recipe = recipe_in_force(config)
        return weight_bytes(model, config.compute_format, layer_loop_for(platform), recipe, axes)

    free = functools.partial(free_memory, platform)
    axes = resolve_mesh(options.mesh, model, num_devices, platform, lambda: free(num_devices), own_weights)
    options = replace(options, mesh=mesh_name(axes))
    if platform != "cpu" and options.kv_memory is None and options.num_pages is None:
        own_pool = free_for_pages(free(mesh_size(axes)), 0 if loaded else own_weights(axes))
        options = replace(options, kv_memory=own_pool * dict(axes).get(TENSOR, 1))
    return resolved(options)


def resolve_here(model: ModelConfig, options: EngineOptions) -> EngineConfig:
    """Every size that an engine on this machine compiles against, and its numerics.

    Raises ValueError, naming the value and the limit, for options that the model or the machine cannot meet.
    """
    platform = jax.default_backend()
    dtype, max_model_len = resolve_dtype(options, platform), _resolve_max_model_len(options, model)
    axes = parse_mesh(options.mesh) if options.mesh else ()
    config = resolve_config(model, options, platform, dtype, max_model_len, axes)
    if options.deterministic is None and _is_invariant_for_nothing(config):
        wanted = replace(options, deterministic=True)
        return resolve_config(model, wanted, platform, dtype, max_model_len, axes)
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
    mesh = make_mesh(config.mesh)
    named = named_parameters(checkpoint, config, mesh)
    named = reported(named, config.model, lambda done, total: on_progress("load", done, total))
    return place_parameters(named, config.model, layer_loop_for(jax.default_backend()), mesh)


def resolve_config(
    model: ModelConfig,
    options: EngineOptions,
    platform: str,
    dtype: FloatFormat,
    max_model_len: int,
    mesh: MeshAxes = (),
) -> EngineConfig:
    """Every size that the engine compiles against, whatever mesh the options name."""
    model = spread_model(model, mesh)
    if len(model.eos_token_ids) > MAX_EOS_IDS:
        raise ValueError(f"{len(model.eos_token_ids)} end-of-sequence ids; the limit is {MAX_EOS_IDS}")
    on_cpu = platform == "cpu"
    sizes = default_sizes(on_cpu=on_cpu)
    num_slots = options.num_slots or sizes.num_slots
    page_size = options.page_size or sizes.page_size
    max_chunk = options.max_chunk or sizes.max_chunk
    kv_format: KvFormat = dtype if options.kv_format == "auto" else options.kv_format
    fewest = _fewest_rows(model, options)
    num_pages = _resolve_pages(
        model, options, platform, kv_format, page_size, num_slots, max_model_len, max_chunk + num_slots
    )
    return EngineConfig(
        model=model,
        cache=CacheConfig(page_size=page_size, num_pages=num_pages, kv_format=kv_format),
        max_model_len=max_model_len,
        num_slots=num_slots,
        decode_rows=ladder(fewest, num_slots),
        chunk_rows=_chunk_rows(options, fewest, num_slots, max_chunk),
        compute_format=dtype,
        recipe=_resolve_recipe(options),
        max_logprobs=min(options.max_logprobs, model.vocab_size),
        logprobs_mode=options.logprobs_mode,
        deterministic=bool(options.deterministic),
        context_block=max(128, page_size),
        max_iterations=options.max_iterations,
        max_drafts=options.max_drafts if options.speculative else 0,
        draft_layers=_resolve_draft_layers(options, model),
        moves_pages=options.host_kv_memory is not None,
        mesh=mesh,
    )


def _fewest_rows(model: ModelConfig, options: EngineOptions) -> int:
    """Rows of the smallest step."""
    if not options.deterministic:
        return 1
    return 1 if _has_exact_products(model, options.quantize) else SHAPE_INVARIANT_ROWS


def _has_exact_products(model: ModelConfig, quantize: str | None) -> bool:
    """Whether a recipe has all of a model's products summed as integers: in any order, to the same bits."""
    # Routers multiply floats in any recipe.
    return quantize is not None and recipe_named(quantize).sums_integers and not model.num_experts


def _chunk_rows(options: EngineOptions, fewest: int, num_slots: int, max_chunk: int) -> tuple[int, ...]:
    """Rows of the steps that take chunks of prompts or verify drafts, and in the shape-invariant mode of all
    steps."""
    longest = max(max_chunk, num_slots)
    if options.deterministic and fewest > 1:
        return ladder(fewest, longest)
    single = ladder(fewest, num_slots) if options.deterministic else ()
    drafts = () if options.speculative is None else (rows for rows in DRAFT_ROWS if rows < longest)
    return tuple(sorted({*single, *drafts, *ladder(lowest_chunk(num_slots), longest)}))


def _resolve_draft_layers(options: EngineOptions, model: ModelConfig) -> int:
    """Layers that draft in the engine. Raises ValueError for more than all but the last."""
    num_layers = read_speculative(options.speculative) if options.speculative else 0
    if num_layers >= model.num_layers:
        raise ValueError(
            f"speculative {options.speculative!r}: the model has {model.num_layers} layers, of which 1 to "
            f"{model.num_layers - 1} can draft"
        )
    return num_layers


def layer_loop_for(platform: str) -> LayerLoop:
    """How a platform likes its parameters stored."""
    loops: dict[str, LayerLoop] = {"cpu": "switched", "tpu": "stacked"}
    return loops.get(platform, "unrolled")


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


def _resolve_max_model_len(options: EngineOptions, model: ModelConfig) -> int:
    length = options.max_model_len or model.max_position
    if not 2 <= length <= model.max_position:
        raise ValueError(f"max_model_len {length} is out of range: the model takes 2 to {model.max_position}")
    return length


def _resolve_pages(
    model: ModelConfig,
    options: EngineOptions,
    platform: str,
    kv_format: KvFormat,
    page_size: int,
    num_slots: int,
    max_model_len: int,
    step_rows: int,
) -> tuple[int, ...]:
    """Pages of each group: what all slots could ever hold, or in proportion what the memory allows."""
    wanted = [
        num_slots * -(-min(max_model_len, window + step_rows if window else max_model_len) // page_size) + 2
        for window in model.windows
    ]
    if options.num_pages is not None:
        return tuple(min(options.num_pages, most) for most in wanted)
    layers = [sum(kind.window == window for kind in model.layers) for window in model.windows]
    page = PageLayout(page_size, model.num_kv_heads, model.head_size, 1, kv_format, kv_format)
    page_bytes = [page.num_bytes(count) for count in layers]
    budget = options.kv_memory or default_pool(platform)
    share = min(1.0, budget / sum(pages * size for pages, size in zip(wanted, page_bytes, strict=True)))
    num_pages = tuple(int(pages * share) for pages in wanted)
    if min(num_pages) < 2:
        raise ValueError(
            f"{budget} bytes of KV memory hold {min(num_pages)} pages of {page_size} tokens "
            "in a cache group; at least 2 are needed"
        )
    return num_pages
