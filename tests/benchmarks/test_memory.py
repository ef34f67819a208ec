"""Memory is what the plan says: weights, pool and what loading holds, measured in processes of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.memory import MIB, Taken, measure
from jaxserve.config import KvFormat

HIDDEN, WIDTH, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD = 512, 2048, 16384, 8, 8, 2, 64
PARAMETERS = VOCAB * HIDDEN + LAYERS * (HIDDEN * HEAD * 2 * (HEADS + KV_HEADS) + 3 * HIDDEN * WIDTH)
"""Norms aside."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 38 million parameters, in float16."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (random.random(shape, np.float32) - 0.5).astype(np.float16)

    ones = np.ones(HIDDEN, np.float16)
    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": ones}
    sizes = {"q": (HEADS * HEAD, HIDDEN), "k": (KV_HEADS * HEAD, HIDDEN), "v": (KV_HEADS * HEAD, HIDDEN)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": matrix(*size) for name, size in sizes.items()}
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD)
        tensors |= {f"{layer}.mlp.{name}_proj.weight": matrix(WIDTH, HIDDEN) for name in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, WIDTH)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = ones.copy()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads resident memory from /proc")
@pytest.mark.parametrize(
    ("recipe", "kv_format", "bits", "kv_bytes"),
    [("f32", "float32", 32, 4.0), ("int8", "int8", 8, 1 + 4 / HEAD)],
)
def test_memory_is_what_the_plan_says(
    model: Path, recipe: str, kv_format: KvFormat, bits: int, kv_bytes: float
) -> None:
    taken = measure(model, recipe, kv_format, num_slots=8, max_model_len=4096)
    assert taken.faults() == []
    # The plan itself, counted by hand: scales and norms are under 2 % of it.
    assert taken.planned_weights == pytest.approx(PARAMETERS * bits / 8, rel=0.02)
    tokens = 8 * 4096
    pool = tokens * LAYERS * KV_HEADS * 2 * HEAD * kv_bytes
    assert taken.planned_pool == pytest.approx(pool, rel=0.02)


def test_what_is_not_as_planned_is_named() -> None:
    good = Taken("int8", "int8", 100 * MIB, 101 * MIB, 180 * MIB, 50 * MIB, 51 * MIB, 40 * MIB)
    assert good.faults() == []
    assert good.peak == 180 * MIB
    (fault,) = replace(good, weights=110 * MIB).faults()
    assert fault == "weights: 110.0 MiB, planned were 100.0"
    (fault,) = replace(good, pool=60 * MIB).faults()
    assert fault == "pool: 60.0 MiB, planned were 50.0"
    (fault,) = replace(good, loading=194 * MIB).faults()
    assert fault == "loading held 194.0 MiB; the limit is 188.0"
