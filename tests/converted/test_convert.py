"""Converted models: the same numbers, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.cli import main
from jaxserve.config import FloatFormat
from jaxserve.converted import convert, restore_parameters
from jaxserve.engine.parameters import quantised
from jaxserve.opened_model import open_model
from jaxserve.quantization import recipe_named
from jaxserve.weights import Checkpoint, open_checkpoint, open_converted
from tests.oracle.tiny_models import write_tiny_model

FORMATS: dict[str, FloatFormat] = {"bf16": "bfloat16"}


def opened(name: str, folder: Path) -> Checkpoint:
    return open_checkpoint(write_tiny_model(name, folder / name))


def read(checkpoint: Checkpoint, recipe: str) -> Iterator[tuple[str, Any]]:
    """What an engine would load."""
    compute_format = FORMATS.get(recipe, "float32")
    if not recipe_named(recipe).rules:
        return checkpoint.read(compute_format)
    return quantised(checkpoint.read("float32"), checkpoint.config, recipe_named(recipe), compute_format)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("gemma3", "bf16"),
        ("gemma3", "int8"),
        ("qwen3_moe", "int4"),
        ("qwen3_moe", "fp8"),
        ("qwen3_moe", "f32"),
    ],
)
def test_every_number_comes_back(model: str, recipe: str, tmp_path: Path) -> None:
    source = opened(model, tmp_path)
    manifest = convert(source, tmp_path / "out", recipe=recipe_named(recipe), group_bytes=20_000)
    assert len(manifest.groups) > 1
    converted = open_converted(tmp_path / "out")
    assert converted.config == source.config
    restored = list(restore_parameters(converted, converted.compute_format))
    expected = list(read(source, recipe))
    assert [name for name, _ in restored] == [name for name, _ in expected]
    for (name, ours), (_, theirs) in zip(restored, expected, strict=True):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs), name
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert one.dtype == other.dtype, name
            np.testing.assert_array_equal(bits(one), bits(other), name)


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def test_a_converted_model_answers_as_its_source(shared_data: Path, tmp_path: Path) -> None:
    path, out = shared_data / "models" / "stories260K" / "hf", tmp_path / "out"
    assert main(["convert", str(path), str(out), "--quantize", "int8"]) == 0
    params = SamplingParams(max_tokens=24, temperature=0.0)
    answers: list[Any] = []
    for model, recipe in ((path, "int8"), (out, None)):
        llm = LLM(model, quantize=recipe, max_model_len=128, num_slots=1, max_chunk=16)
        (answer,) = llm.generate(["Once upon a time"], params)
        answers.append((answer.prompt_token_ids, answer.outputs[0].token_ids, answer.outputs[0].text))
    assert answers[0] == answers[1]
    ours, theirs = open_model(out), open_model(path)
    assert ours.sampling_defaults == theirs.sampling_defaults
    assert ours.checkpoint.config == theirs.checkpoint.config
    assert main(["convert", str(out), "--verify"]) == 0


@pytest.mark.real
def test_the_tokenizer_of_a_gguf_file_goes_along(tmp_path: Path) -> None:
    source = open_model("smollm2-135m")
    assert isinstance(source.checkpoint, Checkpoint)
    convert(source.checkpoint, tmp_path / "out", recipe=recipe_named("int8"))
    converted = open_model(tmp_path / "out")
    text = "Ça va? 1234 tokens,  and <|im_end|> 🙂"
    assert converted.tokenizer.encode(text) == source.tokenizer.encode(text)
    assert converted.tokenizer.eos_token_ids == source.tokenizer.eos_token_ids
    messages = [{"role": "user", "content": "hi"}]
    assert converted.tokenizer.render_chat(messages) == source.tokenizer.render_chat(messages)


def test_plain_numbers_keep_the_narrower_format_and_can_be_quantised_later(tmp_path: Path) -> None:
    source = opened("llama_gqa_tied", tmp_path)
    convert(source, tmp_path / "plain")
    convert(source, tmp_path / "narrow", compute_format="bfloat16")
    plain, narrow = open_converted(tmp_path / "plain"), open_converted(tmp_path / "narrow")
    assert (plain.compute_format, narrow.compute_format) == (source.natural_format, "bfloat16")
    assert len({plain.fingerprint, narrow.fingerprint, source.fingerprint}) == 3
    widened = dict(restore_parameters(narrow, "float32"))
    for name, array in source.read("bfloat16"):
        np.testing.assert_array_equal(widened[name], np.asarray(array, np.float32), name)


def test_what_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    source = opened("llama_gqa_tied", tmp_path)
    folder = tmp_path / "models"
    half: list[Path] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == total:
            half.extend(folder.iterdir())
            with pytest.raises(ValueError, match="config"):
                open_model(half[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, folder / "out", on_progress=interrupt, group_bytes=20_000)
    assert len(half) == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("tokenizer.json", "is not what was written"),
        ("tokenizer_config.json", "is not what was written"),
        ("parameters/000.json", "is not what was written"),
        ("jaxserve.json", "is no description of a converted model"),
    ],
)
def test_a_file_that_was_changed_is_named(file: str, message: str, shared_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(shared_data / "models" / "stories260K" / "hf"), str(out)]) == 0
    content = (out / file).read_bytes()
    (out / file).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(ValueError, match=message) as error:
        open_model(out)
    assert str(out / file) in str(error.value)


def test_damaged_parameters_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    convert(opened("llama_gqa_tied", tmp_path), out)
    largest = max((out / "parameters").rglob("*"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    middle = len(content) // 2
    largest.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(ValueError, match="its hash differs") as error:
        open_converted(out).verify()
    assert str(largest) in str(error.value)
    largest.write_bytes(content[:-1])
    with pytest.raises(
        ValueError, match=rf"has {len(content) - 1} bytes; it was written with {len(content)}"
    ):
        open_converted(out)
    largest.unlink()
    with pytest.raises(ValueError, match="is missing from a converted model"):
        open_converted(out)


def test_what_cannot_be_asked_of_a_converted_model(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = str(shared_data / "models" / "stories260K" / "hf"), tmp_path / "out"
    assert main(["convert", source, str(out), "--quantize", "int8"]) == 0
    for arguments, message in (
        (["convert", source, str(out)], f"{out} exists"),
        (["convert", str(out), str(tmp_path / "again")], "has been converted already"),
        (["convert", source], "name a folder to write to"),
        (["convert", source, "--verify"], "is not a converted model"),
        (
            ["convert", source, str(tmp_path / "x"), "--quantize", "int9"],
            "'int9' is not one of f32, bf16, int8",
        ),
        (["convert", source, str(tmp_path / "x"), "--quantize", "f32", "--dtype", "bfloat16"], "is float32"),
        (["generate", str(out), "-p", "x", "--quantize", "int4"], "has been quantised as 'int8'"),
    ):
        capsys.readouterr()
        assert main(arguments) == 2, arguments
        assert message in capsys.readouterr().err, arguments
    content = json.loads((out / "jaxserve.json").read_text())
    content["recipe"] = "int8@0"
    (out / "jaxserve.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"recipe 'int8@0' is int8@2 in this version"):
        LLM(out)
