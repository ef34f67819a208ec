"""Tiny random checkpoints of every family, in both file formats, and what they must be read as."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 32,
        "tie_word_embeddings": False,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "num_hidden_layers": 4,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "rope_theta": 1e6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
}


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., dict[str, Any]]:
    """The config.json of a tiny model of a family, with any changes."""

    def make(family: str, **changes: Any) -> dict[str, Any]:
        return {**_BASE, **_FAMILIES[family], **changes}

    return make


@pytest.fixture(scope="session")
def random_tensors() -> Callable[[dict[str, Any]], Tensors]:
    """Random tensors of a model, float32, under their Hugging Face names and in those shapes."""
    return _random_tensors


@pytest.fixture(scope="session")
def canonical() -> Callable[[dict[str, Any], Tensors], Tensors]:
    """The parameters that must be read from a model's Hugging Face tensors, in order."""
    return _canonical


@pytest.fixture
def write_hf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder in Hugging Face layout: one file, or with an index over `shards`."""

    def write(config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(tensors.items())[shard::shards])
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model as GGUF as llama.cpp's converter would, matrices quantised to the named type.

    `types` has those of matrices that have another, by name; `metadata` overrides values of the
    architecture's keys, None leaves one out; `extra` tensors are added.
    """

    def write(
        family: str,
        config: dict[str, Any],
        tensors: Tensors,
        quantisation: str = "F32",
        metadata: dict[str, Any] | None = None,
        extra: Tensors | None = None,
        types: dict[str, str] | None = None,
    ) -> Path:
        path = tmp_path / "model.gguf"
        architecture = _ARCHITECTURES[family]
        writer = gguf.GGUFWriter(path, architecture)
        values = {**_gguf_metadata(family, config), **(metadata or {})}
        for key, value in values.items():
            _add_value(
                writer,
                key if "." in key and key.split(".")[0] in _SECTIONS else f"{architecture}.{key}",
                value,
            )
        for name, tensor in {**_gguf_tensors(family, config, tensors), **(extra or {})}.items():
            own = (types or {}).get(name, quantisation)
            kind = gguf.GGMLQuantizationType[own if tensor.ndim > 1 else "F32"]
            data = gguf.quants.quantize(tensor, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _random_tensors(config: dict[str, Any]) -> Tensors:
    hidden, vocab, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    architecture = config["architectures"][0]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        for name, rows in (
            ("q_proj", heads * head),
            ("k_proj", kv_heads * head),
            ("v_proj", kv_heads * head),
        ):
            shapes[f"{attention}.{name}.weight"] = (rows, hidden)
            if architecture.startswith("Qwen2"):
                shapes[f"{attention}.{name}.bias"] = (rows,)
        shapes[f"{attention}.o_proj.weight"] = (hidden, heads * head)
        if architecture.startswith(("Qwen3", "Gemma3")):
            shapes |= {f"{attention}.q_norm.weight": (head,), f"{attention}.k_norm.weight": (head,)}
        if architecture.startswith("Gemma3"):
            for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        if architecture.startswith("Mixtral"):
            mlp = f"model.layers.{layer}.block_sparse_moe"
            shapes |= _expert_shapes(
                mlp, ("w1", "w3", "w2"), config["num_local_experts"], config["intermediate_size"], hidden
            )
        elif architecture.startswith("Qwen3Moe") and layer not in config.get("mlp_only_layers", []):
            names = ("gate_proj", "up_proj", "down_proj")
            shapes |= _expert_shapes(
                mlp, names, config["num_experts"], config["moe_intermediate_size"], hidden
            )
        else:
            width = config["intermediate_size"]
            shapes |= {f"{mlp}.{name}.weight": (width, hidden) for name in ("gate_proj", "up_proj")}
            shapes[f"{mlp}.down_proj.weight"] = (hidden, width)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _expert_shapes(
    block: str, names: tuple[str, str, str], experts: int, width: int, hidden: int
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (experts, hidden)}
    for expert in range(experts):
        gate, up, down = (f"{block}.experts.{expert}.{name}.weight" for name in names)
        shapes |= {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}
    return shapes


def _canonical(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """The layout in plain numpy, whole arrays at a time."""
    hidden, head = config["hidden_size"], config["head_dim"]
    kv_heads = config["num_key_value_heads"]
    queries = config["num_attention_heads"] // kv_heads
    offset = 1.0 if config["architectures"][0].startswith("Gemma3") else 0.0
    found: Tensors = {"embed": tensors["model.embed_tokens.weight"]}
    for layer in range(config["num_hidden_layers"]):
        block = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }

        def grouped(kind: str, block: Tensors = block) -> np.ndarray:
            q, k, v = (block[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
            q = q.reshape(kv_heads, queries, head, *q.shape[1:])
            k, v = (x.reshape(kv_heads, 1, head, *x.shape[1:]) for x in (k, v))
            return np.concatenate([q, k, v], axis=1)

        here: Tensors = {"attn_norm": block["input_layernorm.weight"] + offset, "qkv": grouped("weight")}
        if "self_attn.q_proj.bias" in block:
            here["qkv_bias"] = grouped("bias")
        if "self_attn.q_norm.weight" in block:
            here["q_norm"] = block["self_attn.q_norm.weight"] + offset
            here["k_norm"] = block["self_attn.k_norm.weight"] + offset
        here["o"] = block["self_attn.o_proj.weight"].reshape(hidden, kv_heads, queries, head)
        if offset:
            here["post_attn_norm"] = block["post_attention_layernorm.weight"] + offset
            here["mlp_norm"] = block["pre_feedforward_layernorm.weight"] + offset
        else:
            here["mlp_norm"] = block["post_attention_layernorm.weight"]
        here |= _canonical_mlp(block)
        if offset:
            here["post_mlp_norm"] = block["post_feedforward_layernorm.weight"] + offset
        found |= {f"layers.{layer}.{name}": array for name, array in here.items()}
    found["final_norm"] = tensors["model.norm.weight"] + offset
    if not config["tie_word_embeddings"]:
        found["head"] = tensors["lm_head.weight"]
    return found


def _canonical_mlp(block: Tensors) -> Tensors:
    gates, ups, downs = [], [], []
    for names, into in ((("w1", "gate_proj"), gates), (("w3", "up_proj"), ups), (("w2", "down_proj"), downs)):
        into += [block[name] for name in block if "experts" in name and name.split(".")[-2] in names]
    if not gates:
        gate_up = np.stack([block["mlp.gate_proj.weight"], block["mlp.up_proj.weight"]])
        return {"gate_up": gate_up, "down": block["mlp.down_proj.weight"]}
    router = next(block[name] for name in block if name.endswith((".gate.weight",)))
    pairs = [np.stack(pair) for pair in zip(gates, ups, strict=True)]
    return {"router": router, "expert_gate_up": np.stack(pairs), "expert_down": np.stack(downs)}


_SECTIONS = ("tokenizer", "general", "split")
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3": "gemma3",
}


def _gguf_metadata(family: str, config: dict[str, Any]) -> dict[str, Any]:
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config.get("rope_theta", 1e4),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if family in ("mistral", "gemma3"):
        values["attention.sliding_window"] = config["sliding_window"]
    if family == "gemma3":
        values["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
    if family in ("mixtral", "qwen3_moe"):
        values["expert_count"] = config.get("num_experts", config.get("num_local_experts"))
        values["expert_used_count"] = config["num_experts_per_tok"]
    if family == "qwen3_moe":
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return values


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        add[type(value)](key, value)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GGUF_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_EXPERTS = {
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}


def _gguf_tensors(family: str, config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Renames, stacks experts, permutes q and k in the llama architecture, adds one to Gemma's norms."""
    names = {**_GGUF_NAMES, **(_GGUF_GEMMA_NAMES if family == "gemma3" else {})}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    converted: Tensors = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if ".experts." in stem:
            stacks.setdefault(f"{prefix}{_GGUF_EXPERTS[stem.split('.')[-1]]}.weight", []).append(tensor)
            continue
        last = stem.split(".")[-1]
        if _ARCHITECTURES[family] == "llama" and last in heads:
            shape = tensor.shape
            tensor = tensor.reshape(heads[last], 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)  # noqa: PLW2901
        if family == "gemma3" and "norm" in last:
            tensor = tensor + 1  # noqa: PLW2901
        converted[f"{prefix}{names[stem]}.{kind}"] = tensor
    return converted | {name: np.stack(parts) for name, parts in stacks.items()}
