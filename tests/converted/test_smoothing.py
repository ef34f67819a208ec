"""Smoothing: the same model in other numbers, which are easier to round."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams
from jaxserve.cli import main
from jaxserve.config import ModelConfig
from jaxserve.converted import Calibration, convert, observe_peaks, restore_parameters
from jaxserve.engine.build import configure
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.parameters import place_parameters, quantised
from jaxserve.model.parameters import model_parameters
from jaxserve.quantization import precision_of, recipe_named
from jaxserve.quantization.smoothing import smooth_scales, smoothed
from jaxserve.text.windows import Window
from jaxserve.weights import Checkpoint, ConvertedCheckpoint, open_checkpoint, open_converted
from tests.converted.plain_llama import PlainLlama
from tests.engine.forward import PromptForward
from tests.oracle.cases import load_cases
from tests.oracle.tiny_models import write_tiny_model

Parameters = dict[str, np.ndarray]
FAMILIES = ("llama_gqa_tied", "qwen2", "qwen3_untied", "gemma3", "mixtral", "qwen3_moe_dense_layer")
QUICK = ("qwen2", "gemma3", "qwen3_moe_dense_layer")
"""Between them they have biases, norms on queries and keys, extra norms, and experts beside dense layers."""


def opened(name: str, folder: Path) -> Checkpoint:
    return open_checkpoint(write_tiny_model(name, folder))


def forward_of(name: str, model: ModelConfig) -> PromptForward:
    return PromptForward(model, [case.prompt_ids for case in load_cases(name).cases])


def logits(forward: PromptForward, parameters: Any, model: ModelConfig) -> np.ndarray:
    items = parameters.items() if isinstance(parameters, dict) else parameters
    return np.concatenate(forward.logits(place_parameters(items, model, "switched")))


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Root mean square of the differences over that of the logits."""
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))


def drawn_peaks(model: ModelConfig) -> Parameters:
    """Of every matrix that can be smoothed, over four orders of magnitude."""
    rng = np.random.default_rng(7)
    tied_or_unseen = {"embed", *(["head"] if model.tie_embeddings else [])}
    return {
        name: 10.0 ** rng.uniform(-2, 2, info.shape[len(info.shape) - info.num_input_axes :])
        for name, info in model_parameters(model)
        if not info.full_precision and name not in tied_or_unseen and not name.endswith("expert_down")
    }


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_smoothed_model_is_the_same_model(name: str, tmp_path: Path) -> None:
    checkpoint = opened(name, tmp_path)
    model, forward = checkpoint.config, forward_of(name, checkpoint.config)
    before, peaks = dict(checkpoint.read("float32")), drawn_peaks(model)
    after = dict(smoothed(checkpoint.read("float32"), peaks, 0.5))
    assert list(after) == list(before)
    for matrix, peak in peaks.items():
        # By other factors in every channel, not by one.
        ratio = after[matrix] / before[matrix]
        assert ratio.reshape(-1, peak.size).std(axis=1).min() > 0.1, matrix
    if model.num_experts:  # The router has to follow the norm that it reads.
        assert any(not np.array_equal(after[key], before[key]) for key in before if key.endswith("router"))
    assert difference(logits(forward, after, model), logits(forward, before, model)) < 2e-6


def planted(parameters: Parameters, factor: float) -> Parameters:
    """The same model with a channel of every matrix's input so many times as large, its weights as small."""
    result = {name: array.copy() for name, array in parameters.items()}
    for name in parameters:
        layer = name.removesuffix("attn_norm")
        if layer != name:
            for norm, reader in (("attn_norm", "qkv"), ("mlp_norm", "gate_up")):
                result[layer + norm][5] *= factor
                result[f"{layer}{reader}"][..., 5] /= factor
            result[f"{layer}qkv"][0, -1, 3] *= factor
            result[f"{layer}o"][:, 0, :, 3] /= factor
            result[f"{layer}gate_up"][1, 7] *= factor
            result[f"{layer}down"][:, 7] /= factor
    return result


def test_a_planted_outlier_costs_w8a8_little_once_smoothed(tmp_path: Path) -> None:
    name = "llama_gqa_tied"
    checkpoint = opened(name, tmp_path)
    model, forward, recipe = checkpoint.config, forward_of(name, checkpoint.config), recipe_named("w8a8")
    before = dict(checkpoint.read("float32"))
    harder = planted(before, 200.0)
    exact = logits(forward, before, model)
    assert difference(logits(forward, harder, model), exact) < 1e-5
    plain = PlainLlama(model, harder)
    for case in load_cases(name).cases:
        plain.logits(case.prompt_ids)
    peaks = {key: peak for key, peak in plain.peaks.items() if key != "head"}

    def error(parameters: Any) -> float:
        return difference(logits(forward, quantised(parameters, model, recipe, "float32"), model), exact)

    easy = error(before.items())
    hard = error(harder.items())
    smooth = error(smoothed(harder.items(), peaks, 0.5))
    assert hard > 15 * smooth
    assert smooth < 1.2 * easy


def test_scales_are_those_of_equation_4() -> None:
    peak, weight = np.array([16.0, 1.0, 0.0, 3.0]), np.array([0.25, 4.0, 2.0, 0.0])
    np.testing.assert_allclose(smooth_scales(peak, weight, 0.5), [8, 0.5, 1, 1])
    np.testing.assert_allclose(smooth_scales(peak, weight, 0.75), [16**0.75 / 0.25**0.25, 4**-0.25, 1, 1])
    np.testing.assert_allclose(smooth_scales(peak, weight, 1.0), [16, 1, 1, 1])
    np.testing.assert_allclose(smooth_scales(peak, weight, 0.0), [4, 0.25, 1, 1])
    assert smooth_scales(np.array([1e-30]), np.array([1.0]), 0.5)[0] == np.float32(1e-5)


@pytest.mark.parametrize("name", ["llama_mha", "llama_gqa_tied"])
def test_the_largest_inputs_are_those_of_a_plain_model(name: str, tmp_path: Path) -> None:
    checkpoint = opened(name, tmp_path)
    plain = PlainLlama(checkpoint.config, dict(checkpoint.read("float32")))
    cases = load_cases(name).cases
    for case in cases:
        ours = plain.logits(case.prompt_ids)
        np.testing.assert_allclose(ours[case.positions], case.logits, atol=1e-4)  # Plain, but right.
    windows = [Window(case.prompt_ids) for case in cases]
    # One is longer than a step.
    windows.append(Window(np.resize(np.concatenate([case.prompt_ids for case in cases]), 300)))
    plain.logits(windows[-1].token_ids)
    observed = observe_peaks(checkpoint, windows)
    assert observed.keys() == plain.peaks.keys() - ({"head"} if checkpoint.config.tie_embeddings else set())
    for matrix, peak in observed.items():
        np.testing.assert_allclose(peak, plain.peaks[matrix], rtol=1e-4, atol=1e-6, err_msg=matrix)
    alone = observe_peaks(checkpoint, windows[1:2])
    assert any(not np.allclose(alone[matrix], observed[matrix]) for matrix in observed)


@pytest.mark.parametrize(
    ("name", "norm", "layer", "matrix"),
    [
        ("gemma3", "pre_feedforward_layernorm", 4, "gate_up"),  # In the second repetition of three.
        ("qwen3_moe_dense_layer", "post_attention_layernorm", 2, "expert_gate_up"),
    ],
)
def test_the_largest_inputs_are_those_of_their_own_layer(
    name: str, norm: str, layer: int, matrix: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(name, tmp_path)
    windows = [Window(load_cases(name).cases[1].prompt_ids)]
    before, old = observed_in(folder, windows), dict(open_checkpoint(folder).read("float32"))
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[f"model.layers.{layer}.{norm}.weight"][0] = 500.0
    save_file(weights, file, {"format": "pt"})
    after, new = observed_in(folder, windows), dict(open_checkpoint(folder).read("float32"))
    weight = f"layers.{layer}.mlp_norm"
    grown = np.ones(len(old[weight]))
    grown[0] = new[weight][0] / old[weight][0]
    assert abs(grown[0]) > 100
    for key, peak in before.items():
        if key == f"layers.{layer}.{matrix}":
            np.testing.assert_allclose(after[key], peak * np.abs(grown), rtol=1e-5)
        elif int(key.split(".")[1]) < layer or key.endswith((f"{layer}.qkv", f"{layer}.o")):
            np.testing.assert_allclose(after[key], peak, rtol=1e-5, err_msg=key)


def observed_in(folder: Path, windows: list[Window]) -> Parameters:
    peaks = observe_peaks(open_checkpoint(folder), windows)
    peaks.pop("head", None)
    return peaks


STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 20


def test_a_calibrated_model_is_written_and_restored(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text = shared_data / "models" / "stories260K" / "hf", tmp_path / "story.txt"
    text.write_text(STORY)
    plain, smooth, other = (tmp_path / name for name in ("plain", "smooth", "other"))
    calibrated = ["--calibrate", str(text), "--calibrate-tokens", "300"]
    assert main(["convert", str(source), str(plain), "--quantize", "int8"]) == 0
    assert main(["convert", str(source), str(smooth), "--quantize", "int8", *calibrated]) == 0
    options = [*calibrated, "--smooth-alpha", "0.7"]
    assert main(["convert", str(source), str(other), "--quantize", "int8", *options]) == 0
    checkpoints = [open_converted(folder) for folder in (plain, smooth, other)]
    assert [one.calibration for one in checkpoints] == ["", "smooth-0.5@1", "smooth-0.7@1"]
    assert len({one.fingerprint for one in checkpoints}) == 3
    assert [one.recipe for one in checkpoints] == ["int8@2"] * 3
    entry = json.loads((smooth / "jaxserve.json").read_text())["calibration"]
    assert 300 <= entry["num_tokens"] <= 302
    assert main(["convert", str(smooth), "--verify"]) == 0
    assert main(["evaluate", str(smooth), "--text", str(text)]) == 2
    assert "(int8@2) and would be compared with itself" in capsys.readouterr().err
    # What was quantised are other numbers, and say the same.
    answers: list[str] = []
    for model in (source, smooth):
        llm = LLM(model, max_model_len=128, num_slots=1, max_chunk=16)
        (answer,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=24, temperature=0.0))
        answers.append(answer.outputs[0].text)
    assert answers[0] == answers[1]
    config = configure(checkpoints[1], EngineOptions(quantize="int8"))
    assert precision_of(config) == precision_of(llm.config) == "int8@2 smooth-0.5@1 float32"
    assert replace(config, calibration="") == configure(checkpoints[0], EngineOptions())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibrate", "TEXT"], "a model that is not quantised rounds none; those that do are int8"),
        (["--quantize", "fp8", "--calibrate", "TEXT"], "recipe 'fp8' rounds none"),
        (["--quantize", "int8-weight-only", "--calibrate", "TEXT"], "'int8-weight-only' rounds none"),
        (["--quantize", "w8a8", "--calibrate", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--quantize", "w8a8", "--calibrate", "BYTES"], "bytes.txt: no UTF-8 text"),
        (["--quantize", "w8a8", "--calibrate", "SHORT"], "has 5 tokens, and 256 are needed"),
        (["--quantize", "w8a8", "--calibrate", "TEXT", "--calibrate-tokens", "9999"], "and 9999 are needed"),
        (["--quantize", "w8a8", "--calibrate", "TEXT", "--calibrate-tokens", "9"], "9 is below 256"),
        (["--quantize", "w8a8", "--calibrate", "TEXT", "--smooth-alpha", "1.5"], "1.5 is out of range"),
        (["--quantize", "w8a8", "--calibrate", "TEXT", "--smooth-alpha", "nan"], "nan is out of range"),
        (["--quantize", "w8a8", "--smooth-alpha", "0.5"], "--smooth-alpha needs a text"),
        (["--quantize", "w8a8", "--calibrate-tokens", "500"], "--calibrate-tokens needs a text"),
    ],
)
def test_what_cannot_be_calibrated_is_named(
    arguments: list[str],
    message: str,
    shared_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    contents = {"TEXT": STORY.encode(), "SHORT": b"Once upon a time.", "BYTES": b"\xff\xfe\x00"}
    files = {name: tmp_path / f"{name.lower()}.txt" for name in contents}
    for name, path in files.items():
        path.write_bytes(contents[name])
    source = str(shared_data / "models" / "stories260K" / "hf")
    named = [str(files.get(argument, argument)) for argument in arguments]
    assert main(["convert", source, str(tmp_path / "out"), *named]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_only_what_is_rounded_is_smoothed(tmp_path: Path) -> None:
    source = opened("qwen3_untied", tmp_path / "source")
    ids = [case.prompt_ids for case in load_cases("qwen3_untied").cases]
    calibration = Calibration([Window(one) for one in ids], 0.5, "")
    recipe = recipe_named("*.down=w8a8,*.qkv=int8,*=fp8")
    convert(source, tmp_path / "out", recipe=recipe, calibration=calibration)
    convert(source, tmp_path / "plain", recipe=recipe)
    changed = changed_parameters(*(open_converted(tmp_path / name) for name in ("out", "plain")))
    assert {name.rpartition(".")[2] for name in changed} == {"attn_norm", "qkv", "gate_up", "down"}


def test_a_recipe_that_rounds_only_what_stays_is_refused(tmp_path: Path) -> None:
    source = opened("llama_gqa_tied", tmp_path / "source")
    calibration = Calibration([Window(load_cases("llama_gqa_tied").cases[1].prompt_ids)], 0.5, "")
    with pytest.raises(ValueError, match="'embed=w8a8,\\*=fp8' rounds the activations of no matrix that"):
        convert(source, tmp_path / "out", recipe=recipe_named("embed=w8a8,*=fp8"), calibration=calibration)


def changed_parameters(first: ConvertedCheckpoint, second: ConvertedCheckpoint) -> set[str]:
    ours, theirs = (dict(restore_parameters(one, "float32")) for one in (first, second))
    return {
        name
        for name in ours
        if not all(
            np.array_equal(np.asarray(one), np.asarray(other))
            for one, other in zip(jax.tree.leaves(ours[name]), jax.tree.leaves(theirs[name]), strict=True)
        )
    }
