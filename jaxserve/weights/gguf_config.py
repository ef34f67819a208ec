"""The configuration in a GGUF file's metadata: one entry per architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import Activation, LayerKind, ModelConfig, RopeScaling
from jaxserve.weights.layout import Naming
from jaxserve.weights.naming import GGUF, GGUF_LLAMA
from jaxserve.weights.rope import gguf_rope_scaling, llama3_from_factors, longest_sequence
from jaxserve.weights.settings import Settings, build_config, shorten
from jaxserve.weights.tensors import StoredTensor

ROPE_FACTORS = "rope_freqs.weight"

_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"

# Texts that end a turn; llama.cpp stops at them whatever the metadata says, and older files do not name them.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<end_of_turn>"})
_CONTROL_TOKEN = 3

# Keys that say nothing about the computation, or repeat what tensors and other keys say.
_DESCRIPTIVE = ("vocab_size", "rope.scaling.finetuned")


@dataclass(frozen=True)
class _Architecture:
    """What sets an architecture apart from the plain decoder."""

    family: str
    """As the reader of Hugging Face configs calls it; Mistral and Mixtral come as llama."""
    naming: Naming = GGUF
    windows: Callable[[Settings, int], list[int]] = lambda settings, num_layers: [0] * num_layers
    local_rope_theta: float = 0.0
    """Base of windowed layers where they have their own; scaling then applies to full layers only."""
    fields: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    """Further fields of ModelConfig."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that are the same throughout the architecture."""
    activation: Activation = "silu"


def read_gguf_config(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[ModelConfig, Naming]:
    """The model that a GGUF file's metadata describes, and its tensor names.

    Raises ValueError, naming file and key, for an unknown architecture, for a value that is not supported,
    and for any key of the architecture that is not known here: it might change the computation.
    """
    name = Settings(metadata, path, "general.").choice("architecture", tuple(_ARCHITECTURES))
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{path}: split.count is {metadata['split.count']}; supported: a single file")
    architecture, settings = _ARCHITECTURES[name], Settings(metadata, path, f"{name}.")
    num_heads, hidden_size = settings.integer("attention.head_count"), settings.integer("embedding_length")
    head_size = settings.integer("attention.key_length", hidden_size // num_heads)
    settings.insist(
        {
            "attention.causal": True,
            "attention.value_length": head_size,
            "rope.dimension_count": head_size,
        }
    )
    layers = _layers(settings, architecture, tensors.get(ROPE_FACTORS), head_size)
    experts = _expert_fields(settings)
    tokenizer = Settings(metadata, path, "tokenizer.ggml.")
    config = build_config(
        path,
        family=architecture.family,
        vocab_size=_vocab_size(path, tensors),
        hidden_size=hidden_size,
        intermediate_size=settings.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=settings.integer("attention.head_count_kv", num_heads),
        head_size=head_size,
        layers=layers,
        max_position=longest_sequence(settings.integer("context_length"), layers),
        norm_eps=settings.number("attention.layer_norm_rms_epsilon"),
        activation=architecture.activation,
        tie_embeddings=_OUTPUT not in tensors,
        bos_token_id=tokenizer.optional_integer("bos_token_id", minimum=0),
        eos_token_ids=_eos_token_ids(tokenizer),
        **architecture.traits,
        **architecture.fields(settings),
        **experts,
    )
    _refuse_unknown(settings)
    return config, architecture.naming


def _vocab_size(path: Path, tensors: Mapping[str, StoredTensor]) -> int:
    """Rows of the embedding: the vocab_size key is optional, and the token list may be shorter."""
    if _EMBEDDING not in tensors:
        raise ValueError(f"{path}: tensor {_EMBEDDING} is missing")
    return tensors[_EMBEDDING].shape[0]


def _layers(
    settings: Settings, architecture: _Architecture, factors: StoredTensor | None, head_size: int
) -> tuple[LayerKind, ...]:
    theta = settings.number("rope.freq_base", 10000.0)
    scaling = gguf_rope_scaling(settings, settings.integer("context_length"))
    if factors is not None:
        scaling = _scaling_from_factors(factors, head_size, theta, scaling)
    full = LayerKind(rope_theta=theta, rope_scaling=scaling, experts=bool(settings.get("expert_count")))
    local = full
    if architecture.local_rope_theta:
        local_theta = settings.number("rope.freq_base_swa", architecture.local_rope_theta)
        local = replace(full, rope_theta=local_theta, rope_scaling=None)
    windows = architecture.windows(settings, settings.integer("block_count"))
    return tuple(replace(local, window=window) if window else full for window in windows)


def _scaling_from_factors(
    factors: StoredTensor, head_size: int, theta: float, stated: RopeScaling | None
) -> RopeScaling:
    """The llama3 scaling behind the per-frequency divisors that a file keeps instead of its parameters."""
    divisors = np.empty(factors.shape, np.float32)
    factors.read_into(divisors)
    scaling = llama3_from_factors(divisors, head_size, theta)
    if scaling is None or stated is not None:
        raise ValueError(
            f"{factors.file}: tensor {factors.name} holds rotary divisors {shorten(divisors.tolist())} "
            f"beside scaling {stated}; supported: those of Llama 3 for {head_size // 2} frequencies, "
            f"and no other scaling"
        )
    return scaling


def _expert_fields(settings: Settings) -> dict[str, Any]:
    """The fields of a mixture of experts; these architectures renormalise the chosen weights in llama.cpp."""
    used = settings.integer("expert_used_count", 0, minimum=0)
    if not settings.get("expert_count"):
        return {}
    settings.insist({"expert_weights_norm": True, "expert_weights_scale": 1.0})
    return {
        "num_experts": settings.integer("expert_count"),
        "experts_per_token": used,
        "expert_intermediate_size": settings.integer(
            "expert_feed_forward_length", settings.integer("feed_forward_length")
        ),
    }


def _eos_token_ids(tokenizer: Settings) -> tuple[int, ...]:
    """Ids that end an answer: those named as such, then the control tokens that end a turn by their text."""
    named = [tokenizer.optional_integer(f"{key}_token_id", minimum=0) for key in ("eos", "eot", "eom")]
    texts, kinds = tokenizer.get("tokens") or [], tokenizer.get("token_type") or []
    by_text = [
        index
        for index, (text, kind) in enumerate(zip(texts, kinds, strict=False))
        if kind == _CONTROL_TOKEN and text in _END_OF_TURN
    ]
    return tuple(dict.fromkeys([token for token in named if token is not None] + by_text))


def _refuse_unknown(settings: Settings) -> None:
    for key in _DESCRIPTIVE:
        settings.get(key)
    settings.refuse_unread("absent: what it asks of the model is not known here")


def _uniform_window(settings: Settings, num_layers: int) -> list[int]:
    return [settings.integer("attention.sliding_window", 0, minimum=0)] * num_layers


def _gemma_windows(settings: Settings, num_layers: int) -> list[int]:
    """Each layer windowed but every sixth, or as the pattern says: a period, or a flag for each layer."""
    window = settings.integer("attention.sliding_window")
    pattern = settings.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            settings.refuse("attention.sliding_window_pattern", f"a period, or {num_layers} flags")
        return [window if windowed else 0 for windowed in pattern]
    period = settings.integer("attention.sliding_window_pattern", 6)
    return [window if (index + 1) % period else 0 for index in range(num_layers)]


def _gemma_fields(settings: Settings) -> dict[str, Any]:
    hidden_size, num_heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    head_size = settings.integer("attention.key_length", hidden_size // num_heads)
    # The file does not say what scales the queries. It is the head size but in the 27B model, the one
    # with 62 layers, where it is hidden_size / num_heads.
    scaled_by = hidden_size // num_heads if settings.integer("block_count") == 62 else head_size
    return {
        "embed_scale": hidden_size**0.5,
        "query_scale": scaled_by**-0.5,
        "attn_softcap": settings.optional_number("attn_logit_softcapping") or 0.0,
        "logit_softcap": settings.optional_number("final_logit_softcapping") or 0.0,
    }


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("llama", naming=GGUF_LLAMA, windows=_uniform_window),
    "qwen2": _Architecture("qwen2", traits={"qkv_bias": True}),
    "qwen3": _Architecture("qwen3", traits={"qk_norm": True}),
    "qwen3moe": _Architecture("qwen3_moe", traits={"qk_norm": True}),
    "gemma3": _Architecture(
        "gemma3",
        windows=_gemma_windows,
        local_rope_theta=10000.0,
        fields=_gemma_fields,
        traits={"qk_norm": True, "post_norms": True},
        activation="gelu_tanh",
    ),
}
