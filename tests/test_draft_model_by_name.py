"""`speculative="draft:MODEL"`: the draft model is opened by its name, and must know the same tokens."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams, open_model
from jaxserve.engine.options import EngineOptions
from tests.fake_model import byte_tokenizer
from tests.oracle.tiny_models import write_tiny_model

SIZES = {"num_slots": 2, "max_model_len": 128, "max_chunk": 32, "page_size": 16}


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    return shared_data / "models" / "stories260K" / "hf"


@pytest.fixture
def bytes_model(tmp_path: Path) -> Path:
    folder = write_tiny_model("qwen3", tmp_path / "bytes")
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    return folder


def test_answers_are_the_same_and_the_manifest_says_what_drafts(stories: Path, tmp_path: Path) -> None:
    model = open_model(stories)
    small = shutil.copytree(stories, tmp_path / "small")
    drafted = {"speculative": f"draft:{small}", "max_drafts": 3, "draft_quantize": "int8"}
    prompts = ["Once upon a time", "The little dog"]
    params = [SamplingParams(temperature=0, max_tokens=60), SamplingParams(seed=4, max_tokens=60, stop="the")]
    with LLM(model, progress=False, **SIZES) as llm:  # type: ignore[arg-type]
        expected = llm.generate(prompts, params)
    with LLM(model, progress=False, **SIZES, **drafted) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].text for output in outputs] == [one.outputs[0].text for one in expected]
        assert llm.compiles_after_ready == 0
    options = EngineOptions(**SIZES, **drafted)  # type: ignore[arg-type]
    manifest = model.manifest(model.configure(options), options)
    assert manifest.entries["draft"] == {
        "family": "llama",
        "fingerprint": model.checkpoint.fingerprint,
        "precision": "int8@2 float32",
    }
    assert manifest.entries["scheduler"]["speculative"] == "draft"
    assert str(tmp_path) not in str(manifest.entries)
    plain = replace(options, speculative=None)
    assert "draft" not in model.manifest(model.configure(plain), plain).entries


def test_another_vocabulary_is_refused(stories: Path, bytes_model: Path, tmp_path: Path) -> None:
    model = open_model(stories)
    with pytest.raises(
        ValueError, match=rf"draft model {bytes_model} must have the vocabulary of {stories}: "
    ):
        model.build_engine(EngineOptions(speculative=f"draft:{bytes_model}"))
    other = shutil.copytree(bytes_model, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"!"', '"swapped"'))
    with pytest.raises(ValueError, match=r"token \d+ is 'swapped', there '!'"):
        open_model(bytes_model).configure(EngineOptions(speculative=f"draft:{other}"))
    with pytest.raises(ValueError, match="nowhere"):
        model.configure(EngineOptions(speculative=f"draft:{tmp_path}/nowhere"))
