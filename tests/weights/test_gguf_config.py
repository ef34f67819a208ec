"""What a GGUF file's metadata means; and what it may not ask for."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.config import RopeScaling
from jaxserve.weights import open_checkpoint
from tests.weights.rotary import ropes


@pytest.fixture
def gguf_model(tiny_config, random_tensors, write_gguf):
    """Opens a tiny model of a family whose GGUF metadata has the given changes."""

    def open_changed(family, metadata=None, extra=None, **changes):
        config = tiny_config(family, **changes)
        path = write_gguf(family, config, random_tensors(config), metadata=metadata, extra=extra)
        return open_checkpoint(path).config

    return open_changed


def llama3_divisors(factor, theta=5e5, head_size=32):
    """Llama 3.1's rule, frequency by frequency: how much each is divided by."""
    divisors = []
    for frequency in theta ** -(np.arange(0, head_size, 2) / head_size):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


class TestGguf:
    @pytest.mark.parametrize("factor", [8.0, 32.0])
    def test_llama3_divisors(self, gguf_model, factor):
        config = gguf_model("llama", extra={"rope_freqs.weight": llama3_divisors(factor)})
        assert ropes(config) == [(0, 5e5, RopeScaling(kind="llama3", factor=factor))] * 2

    @pytest.mark.parametrize(
        "divisors",
        [np.linspace(1, 8, 16, dtype=np.float32), llama3_divisors(8.0)[:8], np.full(16, 0.5, np.float32)],
    )
    def test_other_divisors_are_refused(self, gguf_model, divisors):
        with pytest.raises(
            ValueError, match=r"tensor rope_freqs.weight holds rotary divisors .*; supported: those of"
        ):
            gguf_model("llama", extra={"rope_freqs.weight": divisors})

    def test_divisors_beside_another_scaling_are_refused(self, gguf_model):
        scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
        with pytest.raises(ValueError, match=r"rotary divisors .* beside scaling RopeScaling"):
            gguf_model("llama", metadata=scaling, extra={"rope_freqs.weight": llama3_divisors(8.0)})

    def test_linear_scaling_spares_windowed_gemma_layers(self, gguf_model):
        config = gguf_model("gemma3", metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
        assert ropes(config)[:2] == [(16, 1e4, None), (0, 1e6, RopeScaling(kind="linear", factor=8.0))]

    def test_yarn(self, gguf_model):
        config = gguf_model(
            "qwen2",
            metadata={
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.finetuned": True,
            },
        )
        scaling = config.layers[0].rope_scaling
        assert scaling == RopeScaling(
            kind="yarn", factor=4.0, original_max_position=128, attention_factor=0.1 * np.log(4) + 1
        )
        assert config.max_position == 512

    def test_gemma_pattern_of_flags_and_default(self, gguf_model):
        flags = gguf_model("gemma3", metadata={"attention.sliding_window_pattern": [True, True, False, True]})
        assert [kind.window for kind in flags.layers] == [16, 16, 0, 16]
        by_default = gguf_model(
            "gemma3", num_hidden_layers=7, metadata={"attention.sliding_window_pattern": None}
        )
        assert [kind.window for kind in by_default.layers] == [16] * 5 + [0, 16]

    def test_the_27b_gemma_scales_queries_otherwise(self, gguf_model):
        config = gguf_model("gemma3", num_hidden_layers=62, head_dim=8, hidden_size=128, vocab_size=32)
        assert config.query_scale == 32**-0.5

    def test_ids_that_end_an_answer(self, gguf_model):
        config = gguf_model(
            "llama",
            metadata={
                "tokenizer.ggml.eot_token_id": 5,
                "tokenizer.ggml.tokens": ["a", "<|eot_id|>", "b", "<end_of_turn>"],
                "tokenizer.ggml.token_type": [1, 1, 1, 3],
            },
        )
        assert config.eos_token_ids == (2, 5, 3)

    def test_the_embedding_may_have_more_rows_than_the_tokenizer(self, gguf_model):
        assert (
            gguf_model("llama", metadata={"tokenizer.ggml.tokens": ["a"], "vocab_size": 1}).vocab_size == 96
        )

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ({"general.architecture": "mamba"}, "general.architecture is 'mamba'; supported: llama or"),
            ({"split.count": 3}, "split.count is 3; supported: a single file"),
            ({"embedding_scale": 12.0}, "llama.embedding_scale is 12.0; supported: absent"),
            ({"rope.scale_linear": 2.0}, "llama.rope.scale_linear is 2.0; supported: absent"),
            ({"rope.dimension_count": 16}, "llama.rope.dimension_count is 16; supported: 32"),
            ({"attention.value_length": 16}, "llama.attention.value_length is 16; supported: 32"),
            ({"attention.causal": False}, "llama.attention.causal is False; supported: True"),
            ({"attention.head_count_kv": [2, 1]}, r"head_count_kv is \[2, 1\]; supported: an integer"),
            ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'; supported: none or"),
            ({"rope.scaling.factor": 2.0}, "llama.rope.scaling.factor is 2.0; supported: 1.0"),
            ({"context_length": None}, "llama.context_length is missing"),
            ({"general.alignment": 0}, "general.alignment is 0; supported: an integer"),
        ],
    )
    def test_refused_metadata(self, gguf_model, metadata, message):
        with pytest.raises(ValueError, match=rf"model.gguf: .*{message}"):
            gguf_model("llama", metadata=metadata)

    def test_unnormalised_experts_are_refused(self, gguf_model):
        with pytest.raises(ValueError, match=r"qwen3moe.expert_weights_norm is False; supported: True"):
            gguf_model("qwen3_moe", metadata={"expert_weights_norm": False})
