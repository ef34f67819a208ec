"""A tiny random model for every supported family, written as a folder in Hugging Face layout.

Configs are spelt as published checkpoints spell them, some in the older way (`rope_theta`,
`rope_scaling`, `torch_dtype`) and some as transformers 5 writes them (`rope_parameters`, `dtype`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.oracle.tiny_weights import draw, tiny_tensors

_ABSENT: Any = object()
"""A setting that takes a key out of the config, as checkpoints of some age lack it."""

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "rope_theta": 10000.0},
    # Published Qwen configs name a window that their switch leaves off.
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1000000.0,
        "sliding_window": 16,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "head_dim": 16,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 3,
        "rms_norm_eps": 1e-6,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "hidden_act": _ABSENT,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "head_dim": 16,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 3,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
    },
}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """One tiny checkpoint: its config.json, and how its weights are drawn and stored."""

    name: str
    purpose: str
    """What this model alone exercises."""
    config: Mapping[str, Any]
    seed: int
    storage: Literal["float32", "bfloat16"] = "float32"
    num_shards: int = 1


def _model(
    name: str,
    family: str,
    purpose: str,
    seed: int,
    storage: Literal["float32", "bfloat16"] = "float32",
    num_shards: int = 1,
    **settings: Any,
) -> TinyModel:
    merged = {"model_type": family, **_BASE, **_FAMILIES[family], **settings}
    if "rope_parameters" in merged:
        for key in ("rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype"):
            merged.pop(key, None)
        merged["dtype"] = storage
    else:
        merged["torch_dtype"] = storage
    config = {key: value for key, value in merged.items() if value is not _ABSENT}
    return TinyModel(
        name=name,
        purpose=purpose,
        config=MappingProxyType(config),
        seed=seed,
        storage=storage,
        num_shards=num_shards,
    )


_SLIDING, _FULL = "sliding_attention", "full_attention"

_CATALOGUE = (
    _model(
        "llama_mha",
        "llama",
        "as many KV heads as heads; a config of the first Llamas, without KV heads and rope base",
        seed=2,
        num_key_value_heads=_ABSENT,
        rope_theta=_ABSENT,
        rope_scaling=_ABSENT,
    ),
    _model(
        "llama_gqa_tied",
        "llama",
        "grouped queries, head size 8, tied head, three shards with an index",
        seed=4,
        num_shards=3,
        vocab_size=320,
        num_hidden_layers=4,
        num_attention_heads=8,
        tie_word_embeddings=True,
    ),
    _model(
        "llama31_rope",
        "llama",
        "Llama 3.1 frequency scaling: one pair kept, one blended, the rest divided; several ends",
        seed=3,
        rope_theta=500000.0,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        eos_token_id=[2, 3, 5],
    ),
    _model(
        "llama_linear_rope",
        "llama",
        "linear position scaling under its oldest key, type",
        seed=4,
        rope_scaling={"type": "linear", "factor": 4.0},
    ),
    _model(
        "llama_yarn_rope",
        "llama",
        "YaRN with its own attention factor, in rope_parameters",
        seed=6,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
    ),
    _model(
        "mistral_window",
        "mistral",
        "every layer sees 16 tokens",
        seed=1,
        sliding_window=16,
    ),
    _model(
        "mistral_full",
        "mistral",
        "no window; head size that is not hidden / heads; weights stored in bfloat16",
        seed=9,
        storage="bfloat16",
        sliding_window=None,
        vocab_size=200,
        hidden_size=48,
        head_dim=16,
    ),
    _model(
        "qwen2",
        "qwen2",
        "biases on queries, keys and values; tied; a window that is switched off",
        seed=15,
        tie_word_embeddings=True,
    ),
    _model(
        "qwen3",
        "qwen3",
        "norms on queries and keys; tied; head size that is not hidden / heads",
        seed=15,
        hidden_size=40,
        tie_word_embeddings=True,
    ),
    _model(
        "qwen3_untied",
        "qwen3",
        "untied, rope_parameters without scaling, a vocabulary of prime size",
        seed=8,
        vocab_size=131,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    _model(
        "gemma3",
        "gemma3_text",
        "norms of 1 + w, two windows to one full layer from a pattern length, ends inside a pattern",
        seed=4,
        num_hidden_layers=7,
        sliding_window_pattern=3,
    ),
    _model(
        "gemma3_linear_rope",
        "gemma3_text",
        "linear scaling of the full layers only, layer types spelt out, own query scale",
        seed=2,
        num_hidden_layers=4,
        num_key_value_heads=2,
        query_pre_attn_scalar=24,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING],
    ),
    _model(
        "gemma3_rope_parameters",
        "gemma3_text",
        "rope_parameters for each layer type, with scaling; a cap on the logits; untypical order of layers",
        seed=1,
        final_logit_softcapping=12.0,
        num_hidden_layers=4,
        rope_parameters={
            _FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
        layer_types=[_FULL, _SLIDING, _SLIDING, _FULL],
    ),
    _model("mixtral", "mixtral", "four experts, two a token", seed=2),
    _model("qwen3_moe", "qwen3_moe", "eight experts, two a token, weights renormalised", seed=11),
    _model(
        "qwen3_moe_raw",
        "qwen3_moe",
        "expert weights not renormalised; rope_parameters",
        seed=2,
        norm_topk_prob=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    _model(
        "qwen3_moe_dense_layer",
        "qwen3_moe",
        "a dense layer before the expert layers",
        seed=20,
        mlp_only_layers=[0],
    ),
)

TINY_MODELS: Mapping[str, TinyModel] = MappingProxyType({model.name: model for model in _CATALOGUE})


def write_tiny_model(name: str, folder: Path) -> Path:
    """Write the tiny model `name` into `folder`, made if need be, and return the folder.

    It holds config.json, generation_config.json and the weights in one or several safetensors files.
    Raises ValueError if there is no such model.
    """
    if name not in TINY_MODELS:
        raise ValueError(f"no tiny model is called {name!r}; there are {', '.join(TINY_MODELS)}")
    model = TINY_MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", dict(model.config))
    ids = {key: model.config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _write_weights(model, folder)
    return folder


def weights_digest(name: str) -> str:
    """SHA-256 of the tiny model's float32 tensors, by which stored answers know what gave them."""
    model, digest = TINY_MODELS[name], hashlib.sha256()
    for tensor in tiny_tensors(model.config):
        digest.update(tensor.name.encode())
        digest.update(draw(tensor, model.seed).astype("<f4").tobytes())
    return digest.hexdigest()


def _write_weights(model: TinyModel, folder: Path) -> None:
    storage = np.dtype(ml_dtypes.bfloat16 if model.storage == "bfloat16" else np.float32)
    tensors = {tensor.name: draw(tensor, model.seed).astype(storage) for tensor in tiny_tensors(model.config)}
    if model.num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(model.num_shards):
        file = f"model-{shard + 1:05d}-of-{model.num_shards:05d}.safetensors"
        members = names[shard :: model.num_shards]
        save_file({name: tensors[name] for name in members}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(members, file))
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
