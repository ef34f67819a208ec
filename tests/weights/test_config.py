"""What a checkpoint's `config.json` means, in every spelling; and what it may not ask for."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxserve.config import RopeScaling
from jaxserve.weights import open_checkpoint
from tests.weights.rotary import ropes


@pytest.fixture
def hf_model(tiny_config, random_tensors, write_hf):
    """Opens a tiny model of a family whose config.json has the given changes."""

    def open_changed(family, **changes):
        config = tiny_config(family, **changes)
        return open_checkpoint(write_hf(config, random_tensors(config))).config

    return open_changed


def test_dimensions(hf_model):
    config = hf_model("llama", max_position_embeddings=777)
    assert (config.family, config.vocab_size, config.hidden_size, config.intermediate_size) == (
        "llama",
        96,
        64,
        160,
    )
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (2, 4, 2, 32)
    assert (config.max_position, config.norm_eps, config.activation) == (777, 1e-5, "silu")
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_absent_and_null_settings_take_their_defaults(tiny_config, random_tensors, write_hf):
    config = tiny_config("llama", num_key_value_heads=4, head_dim=16)
    tensors = random_tensors(config)
    for key in ("num_key_value_heads", "rms_norm_eps"):
        del config[key]
    found = open_checkpoint(
        write_hf(config | {"head_dim": None, "quantization_config": None}, tensors)
    ).config
    assert (found.num_kv_heads, found.head_size, found.norm_eps) == (4, 16, 1e-6)


def test_the_model_type_stands_in_for_the_architecture(hf_model):
    assert hf_model("qwen3", architectures=["Qwen3ForCausalLM"]).family == "qwen3"


def test_model_type_alone(tiny_config, random_tensors, write_hf):
    config = tiny_config("gemma3")
    tensors = random_tensors(config)
    found = open_checkpoint(write_hf(config | {"architectures": None, "model_type": "gemma3_text"}, tensors))
    assert found.config.family == "gemma3"


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": [7, 2]}, (2, 7)),
        ([5, 6], {}, (5, 6)),
        (None, {"eos_token_id": 3}, (3,)),
    ],
)
def test_end_of_sequence_ids_come_from_both_files(
    own, generation, expected, tiny_config, random_tensors, write_hf
):
    config = tiny_config("llama", eos_token_id=own)
    folder = write_hf(config, random_tensors(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(folder).config.eos_token_ids == expected


class TestWindows:
    @pytest.mark.parametrize(("value", "window"), [(32, 32), (None, 0)])
    @pytest.mark.parametrize("family", ["mistral", "mixtral"])
    def test_uniform(self, hf_model, family, value, window):
        assert hf_model(family, sliding_window=value).windows == (window,)

    def test_mistral_without_the_key_has_the_window_of_transformers(
        self, tiny_config, random_tensors, write_hf
    ):
        config = tiny_config("mistral")
        tensors = random_tensors(config)
        del config["sliding_window"]
        assert open_checkpoint(write_hf(config, tensors)).config.windows == (4096,)

    @pytest.mark.parametrize("family", ["qwen2", "qwen3"])
    def test_qwen(self, hf_model, family):
        asked = {"sliding_window": 8, "num_hidden_layers": 3, "max_window_layers": 1}
        assert hf_model(family, **asked).windows == (0,)
        windows = [kind.window for kind in hf_model(family, use_sliding_window=True, **asked).layers]
        assert windows == [0, 8, 8]
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        found = hf_model(family, use_sliding_window=True, layer_types=types, **asked)
        assert [kind.window for kind in found.layers] == [8, 0, 8]

    def test_qwen3_moe_windows_all_layers(self, hf_model):
        assert hf_model("qwen3_moe", use_sliding_window=True, sliding_window=8).windows == (8,)
        assert hf_model("qwen3_moe", use_sliding_window=False, sliding_window=8).windows == (0,)

    @pytest.mark.parametrize(
        "layer_types", [["full_attention"], ["full_attention", "linear_attention"], ["sliding_attention"] * 2]
    )
    def test_refused_layer_types(self, hf_model, layer_types):
        with pytest.raises(ValueError, match=r"config.json: layer_types is \[.*; supported: a list of 2"):
            hf_model("qwen2", layer_types=layer_types)


class TestGemma:
    LOCAL, FULL = (16, 1e4, None), (0, 1e6, None)

    def test_pattern(self, hf_model):
        config = hf_model("gemma3")
        assert ropes(config) == [self.LOCAL, self.FULL, self.LOCAL, self.FULL]
        assert (config.embed_scale, config.query_scale) == (8.0, 32**-0.5)
        assert config.qk_norm
        assert config.post_norms
        assert config.activation == "gelu_tanh"

    def test_layer_types_win(self, hf_model):
        types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
        assert ropes(hf_model("gemma3", layer_types=types)) == [self.FULL, self.LOCAL, self.LOCAL, self.FULL]

    def test_scaling_is_for_full_layers_only(self, hf_model):
        scaling = RopeScaling(kind="linear", factor=8.0)
        found = ropes(hf_model("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0}))
        assert found == [self.LOCAL, (0, 1e6, scaling)] * 2

    def test_nested_rope_parameters(self, hf_model):
        nested = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e6},
        }
        found = ropes(hf_model("gemma3", rope_parameters=nested, rope_theta=None, rope_local_base_freq=None))
        assert found == [(16, 5e3, None), (0, 2e6, RopeScaling(kind="linear", factor=4.0))] * 2

    def test_softcaps(self, hf_model):
        config = hf_model("gemma3", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
        assert (config.attn_softcap, config.logit_softcap) == (50.0, 30.0)


class TestExperts:
    def test_mixtral(self, hf_model):
        config = hf_model("mixtral")
        assert (config.num_experts, config.experts_per_token, config.expert_intermediate_size) == (4, 2, 160)
        assert config.norm_topk
        assert all(kind.experts for kind in config.layers)

    @pytest.mark.parametrize("normalised", [True, False])
    def test_qwen3_moe(self, hf_model, normalised):
        config = hf_model("qwen3_moe", norm_topk_prob=normalised)
        assert (config.num_experts, config.experts_per_token, config.expert_intermediate_size) == (4, 2, 96)
        assert config.norm_topk is normalised

    def test_dense_layers_among_them(self, hf_model):
        config = hf_model("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
        assert [kind.experts for kind in config.layers] == [True, False, True]

    def test_sparse_step(self, hf_model):
        # The helper's tensors are all experts: what is missing shows which layers were to be dense.
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj\.weight is missing"):
            hf_model("qwen3_moe", decoder_sparse_step=2)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class TestRopeScaling:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({"rope_type": "default"}, None),
            ({"type": "linear", "factor": 2}, RopeScaling(kind="linear", factor=2.0)),
            ({"rope_type": "llama3", **LLAMA3}, RopeScaling(kind="llama3", factor=8.0)),
            (
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                RopeScaling(
                    kind="yarn", factor=4.0, original_max_position=128, attention_factor=0.1 * np.log(4) + 1
                ),
            ),
            (
                {"type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
                RopeScaling(
                    kind="yarn",
                    factor=4.0,
                    original_max_position=256,
                    attention_factor=1.5,
                    beta_fast=16.0,
                    beta_slow=2.0,
                ),
            ),
            (
                {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True},
                RopeScaling(kind="yarn", factor=40.0, original_max_position=256, attention_factor=1.0),
            ),
        ],
    )
    def test_both_spellings(self, hf_model, given, expected):
        old = hf_model("llama", rope_scaling=given)
        new = hf_model("llama", rope_theta=None, rope_parameters={**given, "rope_theta": 5e5})
        assert ropes(old) == ropes(new) == [(0, 5e5, expected)] * 2

    def test_yarn_extends_the_context(self, hf_model):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
        assert hf_model("qwen2", rope_scaling=yarn).max_position == 1024
        assert hf_model("qwen2", rope_scaling=yarn, max_position_embeddings=2048).max_position == 2048

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"rope_type": "longrope", "factor": 2.0},
                "rope_type is 'longrope'; supported: default or linear",
            ),
            ({"type": "dynamic", "factor": 2.0}, "type is 'dynamic'; supported"),
            ({"rope_type": "linear"}, "factor is missing"),
            ({"rope_type": "linear", "factor": -1}, "factor is -1; supported: a positive number"),
            ({"rope_type": "default", "mrope_section": [1]}, "mrope_section is .*; supported: absent"),
            ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "truncate is False; supported: True"),
            (
                {"rope_type": "default", "partial_rotary_factor": 0.5},
                "partial_rotary_factor is 0.5; supported: 1.0",
            ),
        ],
    )
    def test_refused(self, hf_model, given, message):
        with pytest.raises(ValueError, match=rf"config.json: rope_scaling.{message}"):
            hf_model("llama", rope_scaling=given)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"architectures": ["FalconForCausalLM"]},
            r"architectures is \['Falcon.*; supported: Llama",
        ),
        (
            "llama",
            {"architectures": None, "model_type": "falcon"},
            "model_type is 'falcon'; supported: llama or",
        ),
        ("llama", {"attention_bias": True}, "attention_bias is True; supported: False"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True; supported: False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu or"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.quant_method is missing"),
        ("llama", {"quantization_config": [4]}, r"quantization_config is \[4\]; supported: an object"),
        ("llama", {"hidden_size": "64"}, "hidden_size is '64'; supported: an integer"),
        ("llama", {"vocab_size": True}, "vocab_size is True; supported: an integer"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0; supported: a positive number"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; supported: true or false"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'; supported: a token id or a list"),
        ("llama", {"rope_scaling": [8]}, r"rope_scaling is \[8\]; supported: an object"),
        ("llama", {"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types is .*; supported: absent"),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True; supported: False",
        ),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'; supported: a list"),
    ],
)
def test_refused_settings(family, changes, message, tiny_config, random_tensors, write_hf):
    config = tiny_config(family)
    folder = write_hf(config | changes, random_tensors(config))
    with pytest.raises(ValueError, match=rf"config.json: {message}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[]", "holds a JSON list")])
def test_malformed_config(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"config.json: {message}"):
        open_checkpoint(tmp_path)


def test_folder_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"config.json: missing"):
        open_checkpoint(tmp_path)
