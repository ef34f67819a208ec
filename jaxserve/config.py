"""Static descriptions of a model, its cache and an engine: frozen, hashable, free of jax.

Nothing here is "auto": whatever is chosen from the machine or the checkpoint is resolved before one of
these is built, so that a value read from a config is the value in force.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
FloatFormat = Literal["float32", "bfloat16"]
KvFormat = Literal["float32", "bfloat16", "int8", "float8_e4m3fn"]
LogprobsMode = Literal["raw", "processed"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings.

    `linear` divides every position by `factor` (Chen et al. 2023). `llama3` divides only the low
    frequencies and blends between the two wavelength limits (Llama 3.1 model card). `yarn` is the
    NTK-by-parts interpolation of Peng et al. 2023 (arXiv 2309.00071), with its attention factor.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What distinguishes one layer from another within a model."""

    window: int = 0
    """Sliding window in tokens, the query's own included; 0 is full attention."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    experts: bool = False
    """Whether the feed-forward part is a mixture of experts."""


@dataclass(frozen=True)
class Segment:
    """`count` repetitions of `pattern`, starting at layer `first`: what one scan runs over."""

    first: int
    pattern: tuple[LayerKind, ...]
    count: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer. Every supported family is a setting of these fields."""

    family: str
    vocab_size: int
    """Rows of the embedding; a tokenizer may know fewer ids."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    layers: tuple[LayerKind, ...]
    max_position: int
    """Longest sequence, in tokens, that the model was made for."""
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    """Gemma's norms after attention and after the feed-forward part, before the residual sum."""
    embed_scale: float = 1.0
    query_scale: float = 0.0
    """Factor on the attention scores; 0 stands for head_size ** -0.5."""
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    tie_embeddings: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_topk: bool = True
    """Whether the chosen experts' weights are renormalised to sum to one."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} is odd; rotary embeddings need pairs")
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        if any(kind.experts for kind in self.layers) and not (
            0 < self.experts_per_token <= self.num_experts and self.expert_intermediate_size > 0
        ):
            raise ValueError(
                f"expert layers need 0 < experts_per_token <= num_experts and a width, got "
                f"{self.experts_per_token}, {self.num_experts}, {self.expert_intermediate_size}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        return self.query_scale or self.head_size**-0.5

    @property
    def windows(self) -> tuple[int, ...]:
        """The cache groups, as window sizes in order of first use; 0 is full attention."""
        return tuple(dict.fromkeys(kind.window for kind in self.layers))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers cut greedily into the longest runs of a repeating pattern."""
        segments: list[Segment] = []
        first = 0
        while first < len(self.layers):
            length, count = _best_repeat(self.layers[first:])
            segments.append(Segment(first, self.layers[first : first + length], count))
            first += length * count
        return tuple(segments)


def _best_repeat(layers: tuple[LayerKind, ...]) -> tuple[int, int]:
    """The pattern length and count that cover most layers from the first on, shortest pattern first."""
    best = (1, 1)
    for length in range(1, len(layers) // 2 + 1):
        count = 1
        while layers[count * length : (count + 1) * length] == layers[:length]:
            count += 1
        if count > 1 and count * length > best[0] * best[1]:
            best = (length, count)
    return best


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV pool: one group of pages for each of the model's windows."""

    page_size: int
    """Tokens on a page."""
    num_pages: tuple[int, ...]
    """Pages of each group, for each layer; page 0 is a sink that no request is ever given."""
    kv_format: KvFormat = "float32"

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size {self.page_size} is not a power of two")
        if any(pages < 2 for pages in self.num_pages):
            raise ValueError(f"every cache group needs at least 2 pages, got {self.num_pages}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that the device half compiles against; of a mesh with replicas the sizes of each."""

    model: ModelConfig
    cache: CacheConfig
    max_model_len: int
    """Longest sequence, prompt and answer together, in tokens."""
    num_slots: int
    """Sequences that can run at once."""
    decode_rows: tuple[int, ...]
    """The ladder of pure decode steps: rows, one a sequence; empty where none are made."""
    chunk_rows: tuple[int, ...]
    """The ladder of steps that may hold prompt chunks: rows, any number a sequence."""
    compute_format: FloatFormat = "float32"
    recipe: str | None = None
    """Name of the recipe that gives weights their formats; None keeps them in the compute format."""
    stored_formats: tuple[tuple[str, str], ...] = ()
    """Rules of a recipe that a checkpoint brings along, its weights being quantised already: patterns of
    parameter names, and formats. `recipe` is then its label, name and version."""
    num_widened: int = 0
    """Parameters of such a checkpoint that no format holds, and that have the compute format."""
    converted_from: str = ""
    """How the checkpoint stored its weights, where they are all loaded in another form."""
    calibration: str = ""
    """Label of what a text has changed about the weights before they were quantised; empty for nothing."""
    max_logprobs: int = 20
    """Most alternatives that a request may ask for at each position."""
    logprobs_mode: LogprobsMode = "raw"
    """Log-probabilities of the model itself, or of the distribution that was sampled from."""
    deterministic: bool = False
    """Shape-invariant numerics: a row's logits do not depend on what shares its step."""
    context_block: int = field(default=128)
    """Positions that the reference attention reduces at a time; a multiple of the page size."""
    max_iterations: int = 1
    """Tokens of each sequence that one decode step may compute; above 1 each rung has a second program."""
    max_drafts: int = 0
    """Most drafts of a sequence that one step may verify."""
    draft_layers: int = 0
    """Layers of the model whose hidden states the engine drafts from; 0 leaves drafting to the host."""
    draft: EngineConfig | None = None
    """How a second model runs that drafts in the engine. Its keys and values lie in pools of its own, on the
    page ids of the model's full attention."""
    moves_pages: bool = False
    """Whether the host can read and write pages of the pool; there are programs for it then."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes of the device mesh and their sizes, each above 1, but for the one that names a single device among
    others; empty for one device. The model is then as the mesh has it, KV heads repeated where they are fewer
    than the devices that share them out."""
    first_device: int = 0
    """Devices before those of the mesh, which another engine has."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")
        for name in ("decode_rows", "chunk_rows"):
            rungs = getattr(self, name)
            if (
                (not rungs and name == "chunk_rows")
                or list(rungs) != sorted(set(rungs))
                or min(rungs, default=1) < 1
            ):
                raise ValueError(f"{name} {rungs} is not a rising ladder of positive sizes")
        if self.max_drafts < 0:
            raise ValueError(f"max_drafts {self.max_drafts} is negative")
        most_layers = self.model.num_layers - 1 if self.max_drafts else 0
        if not 0 <= self.draft_layers <= most_layers:
            raise ValueError(
                f"draft_layers {self.draft_layers} is out of range: it must be 0 to {most_layers}"
            )
        if self.draft is not None:
            self._check_draft(self.draft)
        if self.decode_rows and self.decode_rows[-1] < self.num_slots:
            raise ValueError(f"decode_rows ends at {self.decode_rows[-1]}, below num_slots {self.num_slots}")
        if self.max_model_len > self.model.max_position:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the model's {self.model.max_position}"
            )
        if len(self.cache.num_pages) != len(self.model.windows):
            raise ValueError(
                f"{len(self.cache.num_pages)} page counts for {len(self.model.windows)} cache groups"
            )
        if self.context_block % self.cache.page_size:
            raise ValueError(
                f"context_block {self.context_block} is not a multiple of page_size {self.cache.page_size}"
            )

    @property
    def num_replicas(self) -> int:
        """Parts of the mesh, each with all weights, and slots and pages of its own."""
        return dict(self.mesh).get("data", 1)

    def drafted_by(self, model: ModelConfig) -> EngineConfig:
        """The same engine with a second model that drafts, in the same formats.

        Raises ValueError for one that takes no sequence of max_model_len tokens, or where there is no place
        for one.
        """
        num_pages = (self.cache.num_pages[self.full_group],) * len(model.windows)
        draft = dataclasses.replace(
            self,
            model=model,
            cache=dataclasses.replace(self.cache, num_pages=num_pages),
            max_drafts=0,
            deterministic=False,  # No token depends on its numerics.
            moves_pages=False,
        )
        return dataclasses.replace(self, draft=draft)

    def _check_draft(self, draft: EngineConfig) -> None:
        if self.draft_layers or not self.max_drafts:
            raise ValueError(
                f"a draft model needs max_drafts from 1 up and draft_layers 0, got {self.max_drafts}, "
                f"{self.draft_layers}"
            )
        num_pages = {self.cache.num_pages[self.full_group]}
        if set(draft.cache.num_pages) != num_pages or draft.cache.page_size != self.cache.page_size:
            raise ValueError(
                f"a draft model's pools have {draft.cache.num_pages} pages of {draft.cache.page_size} "
                f"tokens, and full attention {num_pages} of {self.cache.page_size}"
            )

    @property
    def full_group(self) -> int:
        """The cache group of full attention, whose pages a draft model shares. Raises ValueError where the
        model has none."""
        windows = self.model.windows
        if 0 not in windows:
            raise ValueError(
                f"{self.model.family} has windows of {windows} and no full attention: no draft model"
            )
        return windows.index(0)

    @property
    def pages_per_sequence(self) -> int:
        """Width of a page table: pages that a sequence of max_model_len tokens spans, in whole blocks."""
        pages_per_block = self.context_block // self.cache.page_size
        return math.ceil(self.max_model_len / self.context_block) * pages_per_block

    @property
    def chunk_logit_rows(self) -> int:
        """Rows of a chunk step that can have logits: one a sequence, some for prompt log-probs and drafts."""
        if self.max_drafts:
            return max(2 * self.num_slots, 16)
        return max(self.num_slots, min(16, self.chunk_rows[0]))
