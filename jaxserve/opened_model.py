"""From a model's name to something that answers: what every face starts with."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from jaxserve.async_engine import Engine
from jaxserve.cache_identity import cache_identity
from jaxserve.config import EngineConfig, LogprobsMode
from jaxserve.device_loss import DeviceLostError
from jaxserve.host_pages import page_swap
from jaxserve.interrupts import interrupts_kept
from jaxserve.loop import HostLoop
from jaxserve.plan import EngineLimits, Grammar, SamplingParams, StepEngine
from jaxserve.prefill_side import PrefillSide
from jaxserve.progress import StageBars
from jaxserve.run_manifest import RunManifest, manifest_of
from jaxserve.scheduling import DEFAULT_POLICY, AdmissionGate, CacheIdentity, SchedulerPolicy
from jaxserve.scheduling.page_swap import PageSwap
from jaxserve.speculation import Speculation, named_speculation, read_speculative
from jaxserve.structured import CompiledGrammar, GrammarCompiler
from jaxserve.text import AnswerText, Tokenizer, require_same_vocabulary
from jaxserve.weights import AnyCheckpoint, open_any_checkpoint, resolve_model
from jaxserve.weights.generation_config import read_sampling_defaults

if TYPE_CHECKING:
    from jaxserve.engine.engine import DeviceEngine
    from jaxserve.engine.options import EngineOptions


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineOptions`, for functions that take them as keyword arguments."""

    max_model_len: int | None
    num_slots: int | None
    dtype: Literal["auto", "float32", "bfloat16"]
    quantize: str | None
    kv_format: Literal["auto", "float32", "bfloat16", "int8", "float8_e4m3fn"]
    page_size: int | None
    kv_memory: int | None
    host_kv_memory: int | None
    num_pages: int | None
    max_chunk: int | None
    deterministic: bool | None
    logprobs_mode: LogprobsMode
    max_logprobs: int
    max_iterations: int
    speculative: str | None
    draft_quantize: str | None
    max_drafts: int
    mesh: str | None
    prefill_mesh: str | None
    decode_groups: int | None


@dataclass(frozen=True)
class OpenedModel:
    """A model whose files have been read as far as their headers: cheap, and free of jax."""

    checkpoint: AnyCheckpoint
    """Its end-of-sequence ids are the config's and the tokenizer's together."""
    tokenizer: Tokenizer
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters that the model's makers recommend, by name; see `SamplingParams`."""
    _drafts: dict[str, OpenedModel] = field(
        default_factory=dict["str", "OpenedModel"], repr=False, compare=False
    )
    """Models that have been opened to draft for it, by name."""

    def build_engine(self, options: EngineOptions, *, progress: bool = False) -> DeviceEngine:
        """Load the weights and compile. `progress` shows bars on standard error if it takes long.

        Ctrl-C ends it, at the latest after the tensor and the program that are in the making.

        Raises ValueError, naming the value and the limit, for options that cannot be met.
        """
        from jaxserve.engine.build import build_engine

        draft = self.draft_checkpoint(options, progress=progress)
        with StageBars(progress) as bars, interrupts_kept() as check_interrupt:

            def on_progress(stage: str, done: int, total: int) -> None:
                check_interrupt()
                bars(stage, done, total)

            return build_engine(self.checkpoint, options, draft=draft, on_progress=on_progress)

    def configure(self, options: EngineOptions) -> EngineConfig:
        """What an engine of these options compiles against: reads no weights. Raises as `build_engine`."""
        from jaxserve.engine.build import configure

        return configure(self.checkpoint, options, self.draft_checkpoint(options))

    def draft_checkpoint(self, options: EngineOptions, *, progress: bool = False) -> AnyCheckpoint | None:
        """The model that drafts by these options, if one does; `progress` as of `open_model`.

        Raises ValueError as `open_model` does, or where it has another vocabulary; PullError for a download
        that failed.
        """
        name = read_speculative(options.speculative).model if options.speculative else ""
        if not name:
            return None
        if name not in self._drafts:
            draft = open_model(name, progress=progress)
            require_same_vocabulary(
                draft.tokenizer, f"draft model {name}", self.tokenizer, str(self.checkpoint.path)
            )
            self._drafts[name] = draft
        return self._drafts[name].checkpoint

    def cache_identity(self, engine: DeviceEngine) -> CacheIdentity:
        """What the pages of an engine that was built from it depend on, beside the tokens."""
        identity = cache_identity(self.checkpoint.fingerprint, engine.config)
        if engine.prefill is None:
            return identity
        # Pages come from either, and sums over other devices are rounded otherwise.
        other = cache_identity(self.checkpoint.fingerprint, engine.prefill.config)
        return replace(identity, model=f"{identity.model}, prompts of {other.model}")

    def manifest(
        self,
        config: EngineConfig,
        options: EngineOptions,
        *,
        kernels: Mapping[str, str] | None = None,
        policy: SchedulerPolicy = DEFAULT_POLICY,
        prefix_caching: bool = True,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> RunManifest:
        """All that can change an answer or its speed: see `manifest_of`. By default as `LLM` runs."""
        draft = self.draft_checkpoint(options)
        return manifest_of(
            self.checkpoint.fingerprint,
            self.tokenizer,
            config,
            options,
            draft_fingerprint=None if draft is None else draft.fingerprint,
            kernels=kernels,
            policy=policy,
            prefix_caching=prefix_caching,
            sampling_defaults=self.sampling_defaults if sampling_defaults is None else sampling_defaults,
        )


def open_model(name: str | os.PathLike[str], *, progress: bool = False) -> OpenedModel:
    """Find a model and read its headers and tokenizer, downloading it first if need be.

    Args:
        name: a catalogue name, a folder in Hugging Face layout or from `jaxserve convert`, a `.gguf` file,
            or a hub id.
        progress: show bars on standard error during a download.

    Raises:
        ValueError: no such model, or one that is damaged or not supported.
        PullError: a download failed.
    """
    checkpoint = open_any_checkpoint(resolve_model(os.fspath(name), progress=progress))
    if checkpoint.metadata is None:
        tokenizer = Tokenizer.from_folder(checkpoint.path)
    else:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    config = checkpoint.config
    ends = dict.fromkeys((*config.eos_token_ids, *tokenizer.eos_token_ids))
    # A tokenizer may know more ids than the model, which are never sampled.
    known_ends = tuple(token_id for token_id in ends if token_id < config.vocab_size)
    checkpoint = replace(checkpoint, config=replace(config, eos_token_ids=known_ends))
    return OpenedModel(checkpoint, tokenizer, read_sampling_defaults(checkpoint.path))


class _Grammars:
    """The grammars of one model. Safe to use from several threads.

    The compiler, a fifth of a second's work, is made for the first one.
    """

    def __init__(self, tokenizer: Tokenizer, limits: EngineLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar, compiled now or before. Raises ValueError, naming what is wrong with it or missing;
        CheckLostError as `GrammarCompiler.compile`."""
        with self._lock:
            if self._compiler is None:
                limits = self._limits
                self._compiler = GrammarCompiler(self._tokenizer, limits.vocab_size, limits.eos_token_ids)
            compiler = self._compiler
        return compiler.compile(grammar)


def make_loop(
    engine: StepEngine,
    tokenizer: Tokenizer,
    *,
    overlap: bool = True,
    cache: CacheIdentity | None = None,
    policy: SchedulerPolicy = DEFAULT_POLICY,
    gated: bool = False,
    swap: PageSwap | None = None,
    speculation: Speculation | None = None,
    prefills: PrefillSide | None = None,
) -> HostLoop:
    """A host loop that speaks text: stop strings, streamed text, decoded log-probs, grammars.

    Args:
        engine: the device half.
        tokenizer: the model's.
        overlap: plan a step while the last one runs.
        cache: what the engine's pages depend on, to reuse prefixes; None reuses none.
        policy: who goes next.
        gated: turn requests away where the policy says that there are too many; else all may wait.
        swap: keeps cached pages beyond the engine's pool, from `page_swap`; None keeps none.
        speculation: how answers are drafted, from `named_speculation`; None drafts none.
        prefills: computes prompts for the engine, from `prefill_side`; None leaves all to it.
    """

    def answer_text(prompt_ids: Sequence[int], params: SamplingParams) -> AnswerText:
        return AnswerText(tokenizer, prompt_ids, params)

    return HostLoop(
        engine,
        overlap=overlap,
        answer_text=answer_text,
        decode_token=tokenizer.token_text,
        grammars=_Grammars(tokenizer, engine.limits),
        policy=policy,
        gate=AdmissionGate.for_engine(policy, engine.limits) if gated else None,
        cache=cache,
        swap=swap,
        speculation=speculation,
        prefills=prefills,
    )


def prefill_side(model: OpenedModel, engine: DeviceEngine, *, prefix_caching: bool) -> PrefillSide | None:
    """What computes prompts for an engine that was built from a model, where a second one was for that.

    What moves their pages is compiled here.
    """
    source = engine.prefill
    if source is None:
        return None
    from jaxserve.engine.page_link import DevicePageLink

    cache = model.cache_identity(source) if prefix_caching else None
    return PrefillSide(source, DevicePageLink(source, engine), engine.limits, cache=cache)


def loop_of(
    model: OpenedModel,
    engine: DeviceEngine,
    options: EngineOptions,
    *,
    overlap: bool = True,
    prefix_caching: bool = True,
    policy: SchedulerPolicy | None = None,
) -> HostLoop:
    """The host loop of a model on an engine that was built from it with these options.

    Args:
        model: the model.
        engine: from its `build_engine`; no step may be under way.
        options: what the engine was built with.
        overlap: plan a step while the last one runs.
        prefix_caching: start prompts on what others that began alike have left in the KV pool.
        policy: who goes next, and who is turned away; None turns nobody away.

    Raises ValueError for host memory that holds no page, or without `prefix_caching` for any.
    """
    return make_loop(
        engine,
        model.tokenizer,
        overlap=overlap,
        cache=model.cache_identity(engine) if prefix_caching else None,
        policy=policy or DEFAULT_POLICY,
        gated=policy is not None,
        swap=page_swap(engine, options.host_kv_memory),
        speculation=named_speculation(options.speculative, options.max_drafts),
        prefills=prefill_side(model, engine, prefix_caching=prefix_caching),
    )


def start_engine(
    model: str | os.PathLike[str] | OpenedModel,
    *,
    overlap: bool = True,
    progress: bool = False,
    prefix_caching: bool = True,
    policy: SchedulerPolicy | None = None,
    **settings: Unpack[EngineSettings],
) -> Engine:
    """The asynchronous face of a model: loaded, compiled, and running on a thread of its own.

    Args:
        model: as `open_model` takes it, or what it returned; that has the tokenizer.
        overlap: plan a step while the last one runs.
        progress: show bars on standard error.
        prefix_caching: start prompts on what others that began alike have left in the KV pool.
        policy: who goes next, and who is turned away; by default nobody is.
        settings: fields of `EngineOptions`.

    Raises:
        TypeError: a setting that does not exist.
        ValueError: a model that cannot be read, or a setting that cannot be met.
    """
    from jaxserve.engine.options import engine_options

    options = engine_options(settings)
    if not isinstance(model, OpenedModel):
        model = open_model(model, progress=progress)
    engine = model.build_engine(options, progress=progress)
    loop = loop_of(model, engine, options, overlap=overlap, prefix_caching=prefix_caching, policy=policy)
    return start_loop(loop)


def start_loop(loop: HostLoop) -> Engine:
    """A loop on a thread of its own, whose streams end too where it waits for a process that is lost."""
    from sharding.processes import current_job

    engine = Engine(loop)
    job = current_job()
    if job is not None:
        job.when_lost(lambda loss: engine.fail(DeviceLostError(str(loss))))
    return engine
