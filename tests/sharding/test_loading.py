"""What the processes of a job read of a model, and the memory that it takes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.sharding.jobs import answers_of, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HIDDEN, WIDTH, VOCAB, LAYERS = 512, 2048, 16384, 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path) -> int:
    """A model of 540 MB; returns the bytes of its weights."""
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        own = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        own |= {
            "mlp.gate_proj": (WIDTH, HIDDEN),
            "mlp.up_proj": (WIDTH, HIDDEN),
            "mlp.down_proj": (HIDDEN, WIDTH),
        }
        own |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("mesh", ["tensor=2", "pipe=2"])
def test_each_process_reads_and_holds_its_share(tmp_path: Path, mesh: str) -> None:
    total = write_model(tmp_path)
    for output in run_job("tests.sharding.load_member", [str(tmp_path), mesh], 2):
        told = answers_of(output)
        assert told["share"] < 0.51 * total
        assert told["read"] < 1.02 * told["share"]
        assert told["memory"] < 1.3 * told["share"]
