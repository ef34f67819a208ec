"""Checkpoints as transformers writes them: names, config keys and special values of each family."""

from __future__ import annotations

import pytest

from jaxserve.weights import open_checkpoint, resolve_model

pytestmark = pytest.mark.oracle

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("Llama", {"rope_parameters": SCALING, "tie_word_embeddings": True}, {"family": "llama"}),
        ("Mistral", {"sliding_window": 16}, {"windows": (16,), "tie_embeddings": False}),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            {"windows": (0, 8)},
        ),
        ("Qwen3", {}, {"qk_norm": True}),
        (
            "Gemma3",
            {"sliding_window": 8, "query_pre_attn_scalar": 16},
            {"tie_embeddings": True, "windows": (8,)},
        ),
        ("Mixtral", {"num_local_experts": 4}, {"num_experts": 4, "norm_topk": True}),
        ("Qwen3Moe", {"num_experts": 4, "norm_topk_prob": True, **EXPERTS}, {"expert_intermediate_size": 24}),
    ],
)
def test_saved_models_open_and_read(name, own, expected, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config"))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**COMMON, **own))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for key, value in expected.items():
        assert getattr(checkpoint.config, key) == value
    found = dict(checkpoint.read("float32"))
    weights = model.state_dict()
    key = weights["model.layers.1.self_attn.k_proj.weight"].numpy()
    assert (found["layers.1.qkv"][:, 2].reshape(key.shape) == key).all()
    if checkpoint.config.num_experts:
        # Held fused in memory, whatever the names in the file.
        fused = weights["model.layers.1.mlp.experts.gate_up_proj"].numpy()
        assert (found["layers.1.expert_gate_up"].reshape(fused.shape) == fused).all()
    theta = {"Llama": 5e5}.get(name)
    if theta:
        assert checkpoint.config.layers[0].rope_theta == theta
        assert checkpoint.config.layers[0].rope_scaling.kind == "llama3"


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_is_read_as_transformers_reads_it():
    """Its own GGUF reader undoes the rotary permutation independently of this one."""
    transformers = pytest.importorskip("transformers")
    path = resolve_model("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype="float32"
    )
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    found = dict(open_checkpoint(path).read("float32"))
    for layer in (0, 29):
        q, k, v = (weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv")
        qkv = found[f"layers.{layer}.qkv"]
        assert (qkv[:, :3].reshape(q.shape) == q).all()
        assert (qkv[:, 3].reshape(k.shape) == k).all()
        assert (qkv[:, 4].reshape(v.shape) == v).all()
