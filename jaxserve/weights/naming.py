"""What each family's tensors are called: one entry per family and file format."""

from __future__ import annotations

from jaxserve.weights.layout import Naming

_HF_DENSE = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "q": "model.layers.{layer}.self_attn.q_proj.weight",
    "k": "model.layers.{layer}.self_attn.k_proj.weight",
    "v": "model.layers.{layer}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "o": "model.layers.{layer}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
}

HF_DENSE = Naming(_HF_DENSE)

HF_GEMMA3 = Naming(
    {
        **_HF_DENSE,
        "post_attn_norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm.weight",
        "post_mlp_norm": "model.layers.{layer}.post_feedforward_layernorm.weight",
    },
    norm_offset=1.0,
)

HF_MIXTRAL = Naming(
    {
        **_HF_DENSE,
        "router": "model.layers.{layer}.block_sparse_moe.gate.weight",
        "expert_gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        "expert_up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
        "expert_down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
    }
)

HF_QWEN3_MOE = Naming(
    {
        **_HF_DENSE,
        "router": "model.layers.{layer}.mlp.gate.weight",
        "expert_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "expert_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        "expert_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    }
)

_GGUF = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
    "attn_norm": "blk.{layer}.attn_norm.weight",
    "q": "blk.{layer}.attn_q.weight",
    "k": "blk.{layer}.attn_k.weight",
    "v": "blk.{layer}.attn_v.weight",
    "q_bias": "blk.{layer}.attn_q.bias",
    "k_bias": "blk.{layer}.attn_k.bias",
    "v_bias": "blk.{layer}.attn_v.bias",
    "q_norm": "blk.{layer}.attn_q_norm.weight",
    "k_norm": "blk.{layer}.attn_k_norm.weight",
    "o": "blk.{layer}.attn_output.weight",
    "post_attn_norm": "blk.{layer}.post_attention_norm.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "post_mlp_norm": "blk.{layer}.post_ffw_norm.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
    "router": "blk.{layer}.ffn_gate_inp.weight",
    "expert_gate": "blk.{layer}.ffn_gate_exps.weight",
    "expert_up": "blk.{layer}.ffn_up_exps.weight",
    "expert_down": "blk.{layer}.ffn_down_exps.weight",
}

GGUF = Naming(_GGUF)
"""Qwen and Gemma; the converter has already added one to Gemma's norm weights."""

GGUF_LLAMA = Naming(_GGUF, interleaved_rotary=True)
