"""What a model's keys and values depend on, and what it saves to have them."""

from __future__ import annotations

from jaxserve.config import EngineConfig, LayerKind, ModelConfig
from jaxserve.quantization import precision_of
from jaxserve.scheduling import CacheIdentity


def cache_identity(fingerprint: str, config: EngineConfig) -> CacheIdentity:
    """Under which name an engine's pages are cached.

    Args:
        fingerprint: of the weights and the model's config.
        config: what the engine was compiled for.
    """
    numerics = "shape-invariant" if config.deterministic else "plain"
    # Devices that add up their parts round otherwise than one, and may hold a head several times.
    mesh = "".join(f" {axis}={size}" for axis, size in config.mesh)
    return CacheIdentity(
        model=f"{fingerprint} {precision_of(config)} {numerics}{mesh}",
        kv_format=config.cache.kv_format,
        attention_share=attention_share(config.model),
    )


def attention_share(model: ModelConfig) -> float:
    """What attending to one more token costs, as a part of what a token costs that attends to none.

    Both in multiplications. Layers with a window are left out of the former: beyond it nothing is added.
    """
    full_layers = sum(not kind.window for kind in model.layers)
    per_attended = full_layers * 2 * model.num_heads * model.head_size
    return per_attended / sum(_layer_multiplications(model, kind) for kind in model.layers)


def _layer_multiplications(model: ModelConfig, kind: LayerKind) -> int:
    """Of one token with the matrices of a layer: projections, then a gated feed-forward part."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    if kind.experts:
        width = model.experts_per_token * model.expert_intermediate_size
        router = model.num_experts
    else:
        width, router = model.intermediate_size, 0
    return model.hidden_size * (heads * model.head_size + 3 * width + router)
