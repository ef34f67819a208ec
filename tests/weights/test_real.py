"""Real checkpoints: the trained stories model and its rewrites, and SmolLM2 from the catalogue."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.weights import open_checkpoint, resolve_model


def test_stories(shared_data):
    folder = shared_data / "models" / "stories260K" / "hf"
    stored = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.eos_token_ids == (2, 1)
    found = dict(checkpoint.read("float32"))
    q, k, v = (stored[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkv")
    np.testing.assert_array_equal(found["layers.3.qkv"][:, :2].reshape(64, 64), q)
    np.testing.assert_array_equal(found["layers.3.qkv"][:, 2].reshape(32, 64), k)
    np.testing.assert_array_equal(found["layers.3.qkv"][:, 3].reshape(32, 64), v)


def test_split_experts_put_together_are_the_dense_layer(shared_data):
    """Each channel of the dense layer is in one expert, and the down projections are four times as large."""
    dense = dict(open_checkpoint(shared_data / "models" / "stories260K" / "hf").read("float32"))
    split = dict(open_checkpoint(shared_data / "models" / "stories260K_moe" / "split4_top4").read("float32"))
    gate_up = split["layers.2.expert_gate_up"].transpose(1, 0, 2, 3).reshape(2, -1, 64)
    down = split["layers.2.expert_down"].transpose(1, 0, 2).reshape(64, -1) / 4
    for found, expected in ((gate_up[0], dense["layers.2.gate_up"][0]), (down.T, dense["layers.2.down"].T)):
        rows = found[np.abs(found).sum(1) > 0]
        np.testing.assert_array_equal(rows[np.lexsort(rows.T)], expected[np.lexsort(expected.T)])


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(resolve_model("smollm2-135m"))


@pytest.mark.real
class TestSmolLM2:
    def test_config(self, checkpoint):
        config = checkpoint.config
        assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (30, 9, 3, 64)
        assert (config.vocab_size, config.max_position, config.tie_embeddings) == (49152, 8192, True)
        assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
        assert config.layers[0].rope_theta == 1e5
        assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 49152

    def test_load_is_quick_and_holds_one_copy(self, checkpoint):
        before = resource.getrusage(resource.RUSAGE_SELF)
        again = open_checkpoint(checkpoint.path)
        kept = [array for _, array in again.read("bfloat16")]
        after = resource.getrusage(resource.RUSAGE_SELF)
        loaded = sum(array.nbytes for array in kept)
        largest = max(array.nbytes for array in kept)
        assert (after.ru_maxrss - before.ru_maxrss) * 1024 < 1.3 * loaded + largest
        assert after.ru_utime - before.ru_utime < 5.0  # about 0.7 s on an idle machine
