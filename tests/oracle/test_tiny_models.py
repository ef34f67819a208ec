"""The tiny checkpoints on disk, and that the stored answers are theirs and usable."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from tests.oracle.cases import NUM_GREEDY, load_cases, load_smollm2
from tests.oracle.tiny_models import TINY_MODELS, weights_digest, write_tiny_model
from tests.oracle.tiny_weights import TinyTensor, draw


@pytest.mark.parametrize("name", TINY_MODELS)
def test_stored_answers_belong_to_the_weights(name: str) -> None:
    assert load_cases(name).weights_sha256 == weights_digest(name), "run python -m tests.oracle.regenerate"


@pytest.mark.parametrize("name", TINY_MODELS)
def test_stored_answers_are_well_formed(name: str) -> None:
    vocab_size = TINY_MODELS[name].config["vocab_size"]
    cases = load_cases(name).cases
    assert [len(case.prompt_ids) for case in cases] == [1, 5, 40, 70]
    for case in cases:
        length = len(case.prompt_ids)
        assert case.positions[-1] == length - 1
        assert case.logits.shape == (len(case.positions), vocab_size)
        assert case.nll.shape == (length - 1,)
        assert case.logits[-1].argmax() == case.greedy_ids[0]
        assert case.greedy_ids.shape == case.greedy_logprobs.shape == case.margins.shape == (NUM_GREEDY,)
        assert case.margins.min() > 1e-3
        assert (case.greedy_logprobs < 0).all()
        assert len(set(case.greedy_ids.tolist())) >= 8


@pytest.mark.parametrize("name", TINY_MODELS)
def test_stored_logits_give_the_stored_likelihoods(name: str) -> None:
    case = load_cases(name).cases[1]
    logits = case.logits.astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    followed = logprobs[np.arange(4), case.prompt_ids[1:]]
    np.testing.assert_allclose(-followed, case.nll, atol=1e-5)
    np.testing.assert_allclose(logprobs[-1].max(), case.greedy_logprobs[0], atol=1e-5)


def test_draws_depend_on_seed_and_name_alone() -> None:
    tensor = TinyTensor("a.weight", (500, 40), std=0.5, mean=2.0)
    values = draw(tensor, 1)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, draw(tensor, 1))
    assert not np.array_equal(values, draw(tensor, 2))
    assert not np.array_equal(values, draw(TinyTensor("b.weight", (500, 40), std=0.5, mean=2.0), 1))
    assert abs(values.mean() - 2.0) < 0.02
    assert abs(values.std() - 0.5) < 0.01


def test_a_plain_folder(tmp_path: Path) -> None:
    folder = write_tiny_model("qwen2", tmp_path / "new" / "qwen2")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert file.get_slice("model.layers.0.self_attn.k_proj.bias").get_shape() == [32]
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a mapping


def test_shards_and_their_index(tmp_path: Path) -> None:
    folder = write_tiny_model("llama_gqa_tied", tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    num_bytes = 0
    for path in files:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert index["weight_map"].pop(name) == path.name
                num_bytes += file.get_tensor(name).nbytes
    assert not index["weight_map"]
    assert num_bytes == index["metadata"]["total_size"]


def test_storage_in_bfloat16(tmp_path: Path) -> None:
    folder = write_tiny_model("mistral_full", tmp_path)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert file.get_tensor("model.norm.weight").dtype == ml_dtypes.bfloat16


def test_both_spellings_of_rope_are_there() -> None:
    spelt_new = {name for name, model in TINY_MODELS.items() if "rope_parameters" in model.config}
    assert {"llama_yarn_rope", "qwen3_untied", "gemma3_rope_parameters"} <= spelt_new
    for name in spelt_new:
        assert not {"rope_theta", "rope_scaling", "torch_dtype"} & set(TINY_MODELS[name].config)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tiny model is called 'gpt2'; there are llama_mha, "):
        write_tiny_model("gpt2", tmp_path)
    with pytest.raises(ValueError, match=r"no answers are stored in .*gpt2\.npz"):
        load_cases("gpt2")


def test_smollm2_answers_are_well_formed() -> None:
    stored = load_smollm2()
    assert len(stored.nll_ids) == len(stored.nll) + 1 == 256
    assert sum(case.messages is not None for case in stored.cases) == 3
    for case in stored.cases:
        assert (case.text is None) != (case.messages is None)
        assert len(case.greedy_ids) == len(case.margins) == NUM_GREEDY
        assert case.first_step_top5[0][0] == case.greedy_ids[0]
        gap = case.first_step_top5[0][1] - case.first_step_top5[1][1]
        assert abs(gap - case.margins[0]) < 1e-4
        assert case.num_exact() == NUM_GREEDY
        assert case.num_exact(margin=float(case.margins[3]) + 1e-6) <= 3
