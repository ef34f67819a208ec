"""The tensors of a tiny checkpoint: names and shapes from its config, values from a fixed random stream.

Names are those of published Hugging Face checkpoints, which for experts means one tensor per expert.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

LOGIT_STD = 3.0
"""Spread of the logits: the gap between the two best of some hundred tokens is then about one."""
TIED_RESIDUAL_STD = 0.15
"""Spread of a tied embedding in the residual stream, where a layer's output has about one. With more, the
head would find the last token again and repeat it; the final norm makes up for the small embedding."""
NORM_NOISE = 0.2


@dataclass(frozen=True)
class TinyTensor:
    """One tensor: values are uniform around `mean` with standard deviation `std`."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def tiny_tensors(config: Mapping[str, Any]) -> Iterator[TinyTensor]:
    """Every tensor of the checkpoint that `config` (a config.json) describes, layer by layer."""
    vocab, hidden, tied = config["vocab_size"], config["hidden_size"], config["tie_word_embeddings"]
    embedding_std = _embedding_std(config)
    yield TinyTensor("model.embed_tokens.weight", (vocab, hidden), embedding_std)
    for layer in range(config["num_hidden_layers"]):
        yield from _attention_tensors(config, f"model.layers.{layer}.")
        yield from _feed_forward_tensors(config, f"model.layers.{layer}.", layer)
    yield _norm(
        config, "model.norm.weight", hidden, LOGIT_STD * hidden**-0.5 / embedding_std if tied else 1.0
    )
    if not tied:
        yield TinyTensor("lm_head.weight", (vocab, hidden), LOGIT_STD * hidden**-0.5)


def draw(tensor: TinyTensor, seed: int) -> FloatArray:
    """The tensor's values, a function of `seed` and its name alone.

    Only the raw stream of a bit generator is promised to stay the same between numpy versions, so the
    values are taken from its top 24 bits: exact in float32 before they are scaled.
    """
    stream = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(tensor.name.encode())]))
    size = int(np.prod(tensor.shape))
    raw = np.asarray(stream.random_raw(size), dtype=np.uint64)
    unit = (raw >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0
    values = tensor.mean + tensor.std * 3**0.5 * unit
    return values.astype(np.float32).reshape(tensor.shape)


def _embedding_std(config: Mapping[str, Any]) -> float:
    if not config["tie_word_embeddings"]:
        return 1.0
    lookup_factor = config["hidden_size"] ** 0.5 if config["model_type"] == "gemma3_text" else 1.0
    return TIED_RESIDUAL_STD / lookup_factor


def _attention_tensors(config: Mapping[str, Any], prefix: str) -> Iterator[TinyTensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or hidden // heads
    yield _norm(config, f"{prefix}input_layernorm.weight", hidden)
    # Gains of 1.4 on queries and keys make the scores spread by about two: attention that chooses.
    for name, count, gain in (("q", heads, 1.4), ("k", kv_heads, 1.4), ("v", kv_heads, 1.0)):
        projection = f"{prefix}self_attn.{name}_proj"
        yield _linear(f"{projection}.weight", count * head_dim, hidden, gain)
        if config["model_type"] == "qwen2":
            yield TinyTensor(f"{projection}.bias", (count * head_dim,), 0.5)
    yield _linear(f"{prefix}self_attn.o_proj.weight", hidden, heads * head_dim, 1.5)
    if config["model_type"] in {"qwen3", "qwen3_moe", "gemma3_text"}:
        yield _norm(config, f"{prefix}self_attn.q_norm.weight", head_dim)
        yield _norm(config, f"{prefix}self_attn.k_norm.weight", head_dim)


def _feed_forward_tensors(config: Mapping[str, Any], prefix: str, layer: int) -> Iterator[TinyTensor]:
    hidden = config["hidden_size"]
    yield _norm(config, f"{prefix}post_attention_layernorm.weight", hidden)
    if config["model_type"] == "gemma3_text":
        yield _norm(config, f"{prefix}pre_feedforward_layernorm.weight", hidden)
        yield _norm(config, f"{prefix}post_feedforward_layernorm.weight", hidden)
    if config["model_type"] == "mixtral":
        block = f"{prefix}block_sparse_moe."
        names, width, experts = ("w1", "w3", "w2"), config["intermediate_size"], config["num_local_experts"]
    elif config["model_type"] == "qwen3_moe" and layer not in config["mlp_only_layers"]:
        block = f"{prefix}mlp."
        names, width = ("gate_proj", "up_proj", "down_proj"), config["moe_intermediate_size"]
        experts = config["num_experts"]
    else:
        names = ("gate_proj", "up_proj", "down_proj")
        yield from _gated_mlp(f"{prefix}mlp.", names, hidden, config["intermediate_size"])
        return
    yield _linear(f"{block}gate.weight", experts, hidden, 2.0)
    for expert in range(experts):
        yield from _gated_mlp(f"{block}experts.{expert}.", names, hidden, width)


def _gated_mlp(prefix: str, names: tuple[str, str, str], hidden: int, width: int) -> Iterator[TinyTensor]:
    gate, up, down = names
    yield _linear(f"{prefix}{gate}.weight", width, hidden, 1.2)
    yield _linear(f"{prefix}{up}.weight", width, hidden, 1.2)
    yield _linear(f"{prefix}{down}.weight", hidden, width, 1.5)


def _linear(name: str, outputs: int, inputs: int, gain: float) -> TinyTensor:
    return TinyTensor(name, (outputs, inputs), gain * inputs**-0.5)


def _norm(config: Mapping[str, Any], name: str, size: int, factor: float = 1.0) -> TinyTensor:
    """A norm that multiplies by about `factor`, of which Gemma stores one less."""
    stored_less = 1.0 if config["model_type"] == "gemma3_text" else 0.0
    return TinyTensor(name, (size,), NORM_NOISE * factor, mean=factor - stored_less)
