"""Models whose checkpoints are quantised already, against the float32 models that they stand for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.converted import convert, restore_parameters
from jaxserve.engine.build import configure, load_parameters
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.parameters import abstract_parameters, as_weights, place_parameters
from jaxserve.model.transformer import LayerLoop
from jaxserve.quantization import precision_of, recipe_named
from jaxserve.quantization.weight import QuantisedWeight
from jaxserve.weights import Checkpoint, open_any_checkpoint, open_checkpoint
from tests.engine.forward import PromptForward
from tests.oracle.cases import load_cases
from tests.oracle.tiny_models import write_tiny_model
from tests.weights.packers import packed, plain_type
from tests.weights.quantised_models import CASES, Case, compressed, quantise_folder

COMPUTED = (
    "awq",
    "gptq int4",
    "gptq int8 zeros",
    "ct int8 rows",
    "ct int8 zeros",
    "ct int4 rows",
    "ct fp8",
    "fp8 blocks",
)
"""Cases whose products are made in different ways."""
COMPUTED_BY_EXPERTS = ("awq", "ct int8 rows", "fp8 blocks")


def quantised_model(name: str, case: Case, folder: Path) -> Checkpoint:
    write_tiny_model(name, folder / "source")
    return open_checkpoint(quantise_folder(folder / "source", folder, case))


def relative_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    a, b = np.concatenate(ours), np.concatenate(theirs)
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


@pytest.mark.parametrize(
    ("name", "case"),
    [("llama_gqa_tied", case) for case in COMPUTED] + [("qwen3_moe", case) for case in COMPUTED_BY_EXPERTS],
)
def test_logits_are_those_of_the_numbers_that_are_stored(name: str, case: str, tmp_path: Path) -> None:
    checkpoint = quantised_model(name, CASES[case], tmp_path)
    model = checkpoint.config
    forward = PromptForward(model, [one.prompt_ids for one in load_cases(name).cases])
    ours = forward.logits(place_parameters(as_weights(checkpoint.read_stored("float32")), model, "switched"))
    plain = open_checkpoint(tmp_path / "plain")
    theirs = forward.logits(place_parameters(plain.read("float32"), model, "switched"))
    # Rounded rows move the scores of experts too, and then which ones are chosen.
    rounded = 0.3 if "moe" in name else 0.05
    assert relative_difference(ours, theirs) < (rounded if case == "ct int8 rows" else 1e-5)


@pytest.mark.parametrize("loop", ["switched", "stacked"])
@pytest.mark.parametrize("case", ["awq", "gptq int8 zeros", "fp8 blocks", "gptq act-order"])
def test_programs_are_compiled_for_what_is_loaded(case: str, loop: LayerLoop, tmp_path: Path) -> None:
    checkpoint = quantised_model("qwen3_moe", CASES[case], tmp_path)
    assert checkpoint.stored is not None
    recipe = checkpoint.stored.recipe
    params = place_parameters(as_weights(checkpoint.read_stored("float32")), checkpoint.config, loop)
    abstract = abstract_parameters(checkpoint.config, "float32", loop, recipe)
    shapes = jax.tree.map(lambda array: (array.shape, array.dtype), params)
    assert shapes == jax.tree.map(lambda array: (array.shape, array.dtype), abstract)


def config_of(checkpoint: Any, **settings: Any) -> EngineConfig:
    return configure(checkpoint, EngineOptions(max_model_len=64, num_slots=1, max_chunk=16, **settings))


def test_the_label_says_what_became_of_the_weights(tmp_path: Path) -> None:
    awq = quantised_model("llama_gqa_tied", CASES["awq"], tmp_path / "awq")
    permuted = quantised_model("llama_gqa_tied", CASES["gptq act-order"], tmp_path / "permuted")
    assert precision_of(config_of(awq)) == "awq-int4-32@1 float32"
    assert precision_of(config_of(awq, dtype="bfloat16")) == "awq-int4-32@1 bfloat16"
    assert precision_of(config_of(awq, quantize="int8")) == "awq-int4-32@1 -> int8@2 float32"
    assert precision_of(config_of(awq, quantize="f32")) == "awq-int4-32@1 -> float32"
    assert precision_of(config_of(permuted)) == "gptq-int4-32-actorder -> float32"
    assert precision_of(config_of(permuted, quantize="int8")) == "gptq-int4-32-actorder -> int8@2 float32"


def test_what_is_converted_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    messages: dict[str, list[str]] = {}
    for case, quantize in (("awq", None), ("awq", "int8"), ("gptq act-order", None)):
        checkpoint = quantised_model("llama_gqa_tied", CASES[case], tmp_path / f"{case} {quantize}")
        caplog.clear()
        load_parameters(checkpoint, config_of(checkpoint, quantize=quantize))
        messages[f"{case} {quantize}"] = [record.getMessage() for record in caplog.records]
    assert messages == {
        "awq None": [],
        "awq int8": ["awq-int4-32@1 weights are quantised again, as int8@2"],
        "gptq act-order None": [
            "16 parameters of gptq-int4-32-actorder were converted to float32 "
            "(16: the groups of its inputs are permuted (act-order))"
        ],
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 4}
STORIES = {
    # 172 inputs fill their last word in part.
    "int4 groups of 4": Case(packed(4, 4, symmetric=False), compressed(INT4)),
    "fp8 blocks": Case(
        plain_type("float", "block", block=(32, 32), scale_name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_model_answers_as_the_float_model(name: str, shared_data: Path, tmp_path: Path) -> None:
    folder = quantise_folder(shared_data / "models" / "stories260K" / "hf", tmp_path, STORIES[name])
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=1)
    answers = []
    for model in (folder, tmp_path / "plain"):
        with LLM(model, max_model_len=64, num_slots=1, max_chunk=16) as llm:
            (answer,) = llm.generate(["Once upon a time"], params)
            answers.append(answer.outputs[0])
    ours, theirs = answers
    assert ours.token_ids == theirs.token_ids
    assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("case", ["ct int4 zeros", "ct fp8 blocks", "gptq act-order"])
def test_a_converted_model_keeps_the_stored_numbers(case: str, tmp_path: Path) -> None:
    source = quantised_model("qwen3_moe", CASES[case], tmp_path)
    convert(source, tmp_path / "out")
    converted = open_any_checkpoint(tmp_path / "out")
    assert not isinstance(converted, Checkpoint)
    assert precision_of(config_of(converted)) == precision_of(config_of(source))
    restored = list(restore_parameters(converted, "float32"))
    expected = list(as_weights(source.read_stored("float32")))
    assert any(isinstance(array, QuantisedWeight) for _, array in restored) == (case != "gptq act-order")
    for (name, ours), (_, theirs) in zip(restored, expected, strict=True):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs), name
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert one.dtype == other.dtype, name
            np.testing.assert_array_equal(
                np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8), name
            )


def test_a_converted_model_is_not_quantised_again(tmp_path: Path) -> None:
    source = quantised_model("llama_gqa_tied", CASES["awq"], tmp_path)
    convert(source, tmp_path / "out")
    with pytest.raises(ValueError, match=r"quantize 'int8', but .* has been quantised as 'awq-int4-32'"):
        config_of(open_any_checkpoint(tmp_path / "out"), quantize="int8")
    convert(source, tmp_path / "int8", recipe=recipe_named("int8"))
    again = open_any_checkpoint(tmp_path / "int8")
    assert precision_of(config_of(again)) == "awq-int4-32@1 -> int8@2 float32"
