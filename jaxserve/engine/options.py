"""What a user may choose of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from jaxserve.config import KvFormat, LogprobsMode
from jaxserve.engine.mesh import AUTO
from jaxserve.quantization import recipe_named
from jaxserve.speculation import DEFAULT_MAX_DRAFTS, read_speculative
from sharding import parse_mesh

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
    """Sequences that can run at once, in all replicas; by default 16 in each on CPU, 64 elsewhere."""
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
    """Pages of each cache group instead, in each replica."""
    max_chunk: int | None = None
    """Rows of the largest step, in each replica; by default 256 on CPU, 1024 elsewhere."""
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
    own text; "ngram:TOKENS": also the last so many tokens of others of the same tenant or namespace;
    "skip:N": the model's first N layers; "draft:MODEL": a second model, as any is named, with the same
    vocabulary; None drafts nothing."""
    draft_quantize: str | None = None
    """Recipe of the weights of a draft model; by default as `quantize`. "f32" or "bf16" leaves them alone."""
    max_drafts: int = DEFAULT_MAX_DRAFTS
    """Most drafts of an answer in a step."""
    decode_groups: int | None = None
    """Groups of sequences that decode in turn, each one stage of `pipe` further in every step, so that all
    stages work at once: as many as there are stages, or 1 for steps that go through all of them. By default
    as many as stages; with drafts, several iterations, shape-invariant numerics or a `prefill_mesh` 1."""
    mesh: str | None = None
    """Devices that share the model: `tensor=N`, `expert=N` and `pipe=N`, and `data=N` such groups, each with
    all weights and a part of the sequences; with commas; or "auto": the fewest on which weights leave as much
    memory to pages, then the others too, along `tensor` as far as KV heads go and along `data` beyond. None
    takes the first device."""

    prefill_mesh: str | None = None
    """Devices after those of `mesh` on which prompts are computed, with weights and pages of their own, where
    there is room; answers are decoded on the others. None computes all in one place."""

    def __post_init__(self) -> None:
        for name in (*_SIZES, "decode_groups"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} {value!r} is not a whole number from 1 up")
        for name in ("max_logprobs", "max_iterations", "max_drafts"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r} is not a whole number from 1 up")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(map(str, known))}")
        self._check_names()

    def can_repeat(self, num_replicas: int) -> bool:
        """Whether a mesh that is chosen may have so many replicas."""
        return self.host_kv_memory is None and (self.num_slots or num_replicas) % num_replicas == 0

    def _check_names(self) -> None:
        """Raise ValueError for a name that stands for nothing."""
        if self.speculative is not None:
            try:
                read_speculative(self.speculative)
            except ValueError as error:
                raise ValueError(f"speculative {error}") from error
        for recipe in (self.quantize, self.draft_quantize):
            if recipe is not None:
                recipe_named(recipe)
        if self.prefill_mesh == AUTO:
            raise ValueError("prefill_mesh auto: name its axes, as in tensor=2")
        for mesh in (self.mesh, self.prefill_mesh):
            if mesh not in (None, AUTO):
                parse_mesh(mesh)


def engine_options(settings: Mapping[str, Any]) -> EngineOptions:
    """Options from keyword arguments. Raises TypeError, listing the options, for one that does not exist."""
    known = [option.name for option in fields(EngineOptions)]
    for name in settings:
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}; the options are {', '.join(known)}")
    return EngineOptions(**settings)
