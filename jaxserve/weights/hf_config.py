"""The configuration of a checkpoint in Hugging Face layout: one entry per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.config import Activation, LayerKind, ModelConfig, RopeScaling
from jaxserve.weights.layout import Naming
from jaxserve.weights.naming import HF_DENSE, HF_GEMMA3, HF_MIXTRAL, HF_QWEN3_MOE
from jaxserve.weights.rope import hf_rope_scaling, longest_sequence
from jaxserve.weights.settings import Settings, build_config

_FULL, _SLIDING = "full_attention", "sliding_attention"

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Settings that change the computation and have one supported value.
_FIXED: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_bidirectional_attention": False,
}


@dataclass(frozen=True)
class _Family:
    """What sets a family apart; the defaults are those of its config class in transformers."""

    name: str
    model_type: str
    naming: Naming = HF_DENSE
    windows: Callable[[Settings, int], list[int]] = lambda settings, num_layers: [0] * num_layers
    expert_layers: Callable[[Settings, int], list[bool]] = lambda settings, num_layers: [False] * num_layers
    fields: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    """Further fields of ModelConfig."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that are the same throughout the family."""
    activation_key: str = "hidden_act"
    activation: str = "silu"
    rope_theta: float = 10000.0
    local_rope_theta: float = 0.0
    """Base of windowed layers where they have their own; flat scaling then applies to full layers only."""
    norm_eps: float = 1e-6
    tie_embeddings: bool = False


def read_hf_config(folder: Path) -> tuple[ModelConfig, Naming]:
    """The model that `config.json` and `generation_config.json` in a folder describe, and its tensor names.

    Raises ValueError, naming file, key and value, for whatever changes the computation and is not supported.
    """
    settings = Settings.from_json(folder / "config.json")
    family = _find_family(settings)
    settings.insist(_FIXED)
    num_heads = settings.integer("num_attention_heads")
    hidden_size = settings.integer("hidden_size")
    layers = _layers(settings, family)
    config = build_config(
        settings.source,
        family=family.name,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", num_heads),
        head_size=settings.integer("head_dim", hidden_size // num_heads),
        layers=layers,
        max_position=longest_sequence(settings.integer("max_position_embeddings"), layers),
        norm_eps=settings.number("rms_norm_eps", family.norm_eps),
        activation=_ACTIVATIONS[
            settings.choice(family.activation_key, tuple(_ACTIVATIONS), family.activation)
        ],
        tie_embeddings=settings.flag("tie_word_embeddings", family.tie_embeddings),
        bos_token_id=next(iter(settings.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(settings, folder / "generation_config.json"),
        **family.traits,
        **family.fields(settings),
    )
    return config, family.naming


def _find_family(settings: Settings) -> _Family:
    architectures = settings.get("architectures")
    if architectures is not None:
        name = architectures[0] if isinstance(architectures, list) and architectures else architectures
        if not isinstance(name, str) or name not in _FAMILIES:
            settings.refuse("architectures", ", ".join(_FAMILIES))
        return _FAMILIES[name]
    by_type = {family.model_type: family for family in _FAMILIES.values()}
    return by_type[settings.choice("model_type", tuple(by_type))]


def _layers(settings: Settings, family: _Family) -> tuple[LayerKind, ...]:
    count = settings.integer("num_hidden_layers")
    kinds = zip(family.windows(settings, count), family.expert_layers(settings, count), strict=True)
    layers = []
    for window, experts in kinds:
        theta, scaling = _rope(settings, family, window)
        layers.append(LayerKind(window=window, rope_theta=theta, rope_scaling=scaling, experts=experts))
    return tuple(layers)


def _eos_token_ids(settings: Settings, generation_config: Path) -> tuple[int, ...]:
    """Ids that end an answer by either file, those of the config first."""
    ids = settings.token_ids("eos_token_id")
    if generation_config.exists():
        ids += Settings.from_json(generation_config).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _rope(settings: Settings, family: _Family, window: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    `rope_parameters` may be nested by layer type.
    """
    local = window > 0 and family.local_rope_theta > 0
    if local:
        theta = settings.number("rope_local_base_freq", family.local_rope_theta)
    else:
        theta = settings.number("rope_theta", family.rope_theta)
    rope = settings.section("rope_scaling") or settings.section("rope_parameters")
    if rope and (rope.mentions(_FULL) or rope.mentions(_SLIDING)):
        rope = rope.section(_SLIDING if window else _FULL)
    elif local:
        rope = None
    if rope is None:
        return theta, None
    max_position = settings.integer("max_position_embeddings")
    return rope.number("rope_theta", theta), hf_rope_scaling(rope, max_position)


def _uniform_window(settings: Settings, num_layers: int, default: int = 0) -> list[int]:
    """One window for all layers; null is none. It counts the query's own position, as in transformers."""
    absent = 0 if settings.mentions("sliding_window") else default
    return [settings.integer("sliding_window", absent, minimum=0)] * num_layers


def _mistral_windows(settings: Settings, num_layers: int) -> list[int]:
    settings.insist({"layer_types": None})
    return _uniform_window(settings, num_layers, default=4096)


def _qwen_windows(settings: Settings, num_layers: int) -> list[int]:
    """By `layer_types`, or else from layer `max_window_layers` on; nowhere unless `use_sliding_window`."""
    window = 0
    if settings.flag("use_sliding_window", False):
        window = _uniform_window(settings, 1, default=4096)[0]
    unwindowed = settings.integer("max_window_layers", 28, minimum=0)
    default = [_FULL if not window or i < unwindowed else _SLIDING for i in range(num_layers)]
    return _windows_by_type(settings, num_layers, window, default)


def _qwen_moe_windows(settings: Settings, num_layers: int) -> list[int]:
    return (
        _uniform_window(settings, num_layers, 4096)
        if settings.flag("use_sliding_window", False)
        else [0] * num_layers
    )


def _gemma_windows(settings: Settings, num_layers: int) -> list[int]:
    """By `layer_types`, or else each layer windowed but every sixth (or as `sliding_window_pattern` says)."""
    period = settings.integer("sliding_window_pattern", settings.integer("_sliding_window_pattern", 6))
    default = [_SLIDING if (i + 1) % period else _FULL for i in range(num_layers)]
    return _windows_by_type(settings, num_layers, settings.integer("sliding_window", 4096), default)


def _windows_by_type(settings: Settings, num_layers: int, window: int, default: list[str]) -> list[int]:
    types = settings.get("layer_types") or default
    supported = (_FULL, _SLIDING) if window else (_FULL,)
    if len(types) != num_layers or not set(types) <= set(supported):
        settings.refuse("layer_types", f"a list of {num_layers}, each {' or '.join(supported)}")
    return [window if layer_type == _SLIDING else 0 for layer_type in types]


def _qwen3_moe_experts(settings: Settings, num_layers: int) -> list[bool]:
    dense = settings.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        settings.refuse("mlp_only_layers", "a list of layer numbers")
    step = settings.integer("decoder_sparse_step", 1)
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def _num_experts(settings: Settings) -> int:
    """Each name is an alias of the other in transformers; which one is written depends on its version."""
    key = "num_local_experts" if settings.mentions("num_local_experts") else "num_experts"
    return settings.integer(key)


def _qwen3_moe_fields(settings: Settings) -> dict[str, Any]:
    return {
        "num_experts": _num_experts(settings),
        "experts_per_token": settings.integer("num_experts_per_tok"),
        "expert_intermediate_size": settings.integer("moe_intermediate_size"),
        "norm_topk": settings.flag("norm_topk_prob", False),
    }


def _mixtral_fields(settings: Settings) -> dict[str, Any]:
    return {
        "num_experts": _num_experts(settings),
        "experts_per_token": settings.integer("num_experts_per_tok"),
        "expert_intermediate_size": settings.integer("intermediate_size"),
    }


def _gemma_fields(settings: Settings) -> dict[str, Any]:
    return {
        "embed_scale": settings.integer("hidden_size") ** 0.5,
        "query_scale": settings.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attn_softcap": settings.optional_number("attn_logit_softcapping") or 0.0,
        "logit_softcap": settings.optional_number("final_logit_softcapping") or 0.0,
    }


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", "llama"),
    "MistralForCausalLM": _Family("mistral", "mistral", windows=_mistral_windows),
    "Qwen2ForCausalLM": _Family("qwen2", "qwen2", windows=_qwen_windows, traits={"qkv_bias": True}),
    "Qwen3ForCausalLM": _Family("qwen3", "qwen3", windows=_qwen_windows, traits={"qk_norm": True}),
    "Gemma3ForCausalLM": _Family(
        "gemma3",
        "gemma3_text",
        naming=HF_GEMMA3,
        windows=_gemma_windows,
        fields=_gemma_fields,
        traits={"qk_norm": True, "post_norms": True},
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        rope_theta=1e6,
        local_rope_theta=1e4,
        tie_embeddings=True,
    ),
    "MixtralForCausalLM": _Family(
        "mixtral",
        "mixtral",
        naming=HF_MIXTRAL,
        windows=_uniform_window,
        expert_layers=lambda settings, num_layers: [True] * num_layers,
        fields=_mixtral_fields,
        rope_theta=1e6,
        norm_eps=1e-5,
    ),
    "Qwen3MoeForCausalLM": _Family(
        "qwen3_moe",
        "qwen3_moe",
        naming=HF_QWEN3_MOE,
        windows=_qwen_moe_windows,
        expert_layers=_qwen3_moe_experts,
        fields=_qwen3_moe_fields,
        traits={"qk_norm": True},
    ),
}
