"""Models to plan with: a few well-known configurations by name, and any folder with a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxserve.config import LayerKind, ModelConfig, RopeScaling

_LLAMA_31_ROPE = LayerKind(
    rope_theta=500000.0,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position=8192),
)

_LLAMA_70B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_size=128,
    layers=(_LLAMA_31_ROPE,) * 80,
    max_position=131072,
    tie_embeddings=False,
)

MODELS: Mapping[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        layers=(LayerKind(rope_theta=100000.0),) * 30,
        max_position=8192,
    ),
    "llama-3.1-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        layers=(_LLAMA_31_ROPE,) * 32,
        max_position=131072,
        tie_embeddings=False,
    ),
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.3-70b": _LLAMA_70B,
    "mixtral-8x7b": ModelConfig(
        family="mixtral",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        layers=(LayerKind(rope_theta=1000000.0, experts=True),) * 32,
        max_position=32768,
        tie_embeddings=False,
        num_experts=8,
        experts_per_token=2,
        expert_intermediate_size=14336,
    ),
    "mixtral-8x22b": ModelConfig(
        family="mixtral",
        vocab_size=32000,
        hidden_size=6144,
        intermediate_size=16384,
        num_heads=48,
        num_kv_heads=8,
        head_size=128,
        layers=(LayerKind(rope_theta=1000000.0, experts=True),) * 56,
        max_position=65536,
        tie_embeddings=False,
        num_experts=8,
        experts_per_token=2,
        expert_intermediate_size=16384,
    ),
    "qwen3-30b-a3b": ModelConfig(
        family="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_heads=32,
        num_kv_heads=4,
        head_size=128,
        layers=(LayerKind(rope_theta=1000000.0, experts=True),) * 48,
        max_position=40960,
        qk_norm=True,
        tie_embeddings=False,
        num_experts=128,
        experts_per_token=8,
        expert_intermediate_size=768,
    ),
}


def find_model(name: str) -> ModelConfig:
    """A known model, or the one that a folder in Hugging Face layout describes, or the config.json in one.

    Weights are not read.

    Raises ValueError for a name that is neither, and for a config.json that is not supported.
    """
    if name in MODELS:
        return MODELS[name]
    folder = Path(name).parent if Path(name).name == "config.json" else Path(name)
    if (folder / "config.json").is_file():
        from jaxserve.weights.hf_config import read_hf_config

        return read_hf_config(folder)[0]
    raise ValueError(f"model {name!r} is neither one of {', '.join(MODELS)} nor a folder with a config.json")
