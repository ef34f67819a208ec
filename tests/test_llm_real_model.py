"""The library's face over a small real model: its answers, whoever runs beside them, are the oracle's."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, OpenedModel, RequestOutput, SamplingParams, open_model, start_engine
from jaxserve.engine.options import EngineOptions


class Reused(OpenedModel):
    """An opened model that is built already."""

    engine: Any

    @classmethod
    def around(cls, model: OpenedModel, engine: Any) -> Reused:
        reused = cls(model.checkpoint, model.tokenizer)
        object.__setattr__(reused, "engine", engine)
        return reused

    def build_engine(self, options: EngineOptions, *, progress: bool = False) -> Any:
        return self.engine


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    return shared_data / "models" / "stories260K" / "hf"


@pytest.fixture(scope="module")
def stories_engine(stories: Path) -> Any:
    options = EngineOptions(max_model_len=256, num_slots=4, max_chunk=16, max_logprobs=5)
    return open_model(stories).build_engine(options)


@pytest.fixture
def llm(stories: Path, stories_engine: Any) -> Iterator[LLM]:
    with LLM(Reused.around(open_model(stories), stories_engine), progress=False) as llm:
        yield llm
        llm.check_integrity()
        assert llm.compiles_after_ready == 0


@pytest.fixture(scope="module")
def golden(shared_data: Path) -> list[dict[str, Any]]:
    return json.loads((shared_data / "golden" / "stories260K.json").read_text())["cases"]


def agrees(case: dict[str, Any], token_ids: list[int]) -> bool:
    """Whether greedy ids are the oracle's, up to its first step with a margin that rounding may flip."""
    close = [index for index, margin in enumerate(case["top2_margin"]) if margin < 1e-3]
    num_sure = min([*close, len(case["output_ids"]), len(token_ids)])
    assert num_sure >= 8
    return token_ids[:num_sure] == case["output_ids"][:num_sure]


def test_golden_answers_in_one_batch_with_others(llm: LLM, golden: list[dict[str, Any]]) -> None:
    prompts: list[Any] = [case["prompt_ids"] for case in golden]
    lengths = [min(len(case["output_ids"]), 255 - len(case["prompt_ids"])) for case in golden]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    noise = [SamplingParams(temperature=1.0 + i / 10, top_k=i, n=2, max_tokens=9, seed=i) for i in range(6)]
    outputs = llm.generate(prompts + ["Once upon a time"] * 6, params + noise)
    for case, output in zip(golden, outputs, strict=False):
        assert agrees(case, output.outputs[0].token_ids)


def test_text_in_text_out(llm: LLM, golden: list[dict[str, Any]]) -> None:
    case = next(case for case in golden if case["prompt_ids"] == [1])
    (output,) = llm.generate("", SamplingParams(temperature=0, max_tokens=32))
    assert output.prompt_token_ids == [1]
    assert case["text"].startswith(output.outputs[0].text.strip())
    assert len(output.outputs[0].text) > 50


def test_samples_and_log_probs(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=7, logprobs=2, prompt_logprobs=1, seed=5, ignore_eos=True)
    (output,) = llm.generate("Lily saw a", params)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    for sample in output.outputs:
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids) == 7
        for token, position in zip(sample.token_ids, sample.logprobs, strict=True):
            assert token in position
            assert 2 <= len(position) <= 3
            assert position[token].decoded_token == llm.tokenizer.token_text(token)
            assert all(entry.logprob <= 0 and entry.rank >= 1 for entry in position.values())
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_a_real_stream_plain_and_overlapped(llm: LLM, stories: Path, stories_engine: Any) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3, stop="garden")
    (whole,) = llm.generate("Lily went to the", params)
    deltas = [*llm.stream("Lily went to the", params)]
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    stream = llm.stream("Lily", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    llm.check_integrity()
    with LLM(Reused.around(open_model(stories), stories_engine), overlap=False, progress=False) as plain:
        assert plain.generate("Lily went to the", params)[0].outputs == whole.outputs


def test_chat_with_a_folder_that_has_a_template(stories: Path, stories_engine: Any, tmp_path: Path) -> None:
    shutil.copytree(stories, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[-1].content }}")
    with LLM(Reused.around(open_model(tmp_path), stories_engine), progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        (chat,) = llm.chat([{"role": "user", "content": "Lily saw"}], params)
        (plain,) = llm.generate("Lily saw", params)
        assert chat.prompt_token_ids == plain.prompt_token_ids
        assert chat.outputs == plain.outputs


def test_limits_and_config_say_what_is_in_force(llm: LLM) -> None:
    assert (llm.limits.max_model_len, llm.limits.num_slots) == (256, 4)
    assert llm.config.compute_format == llm.config.cache.kv_format == "float32"
    assert llm.get_tokenizer() is llm.tokenizer
    with pytest.raises(ValueError, match="prompt 0: the prompt has 256 tokens; the limit is 255"):
        llm.generate([[5] * 256])


def test_the_tokenizer_and_the_config_end_answers_together(stories: Path, tmp_path: Path) -> None:
    shutil.copytree(stories, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    assert open_model(tmp_path).checkpoint.config.eos_token_ids == (7, 2)


def test_the_asynchronous_face(stories: Path, stories_engine: Any, llm: LLM) -> None:
    model = Reused.around(open_model(stories), stories_engine)
    params = SamplingParams(temperature=0, max_tokens=8)
    prompt = model.tokenizer.encode("Lily saw")

    async def main() -> RequestOutput:
        async with start_engine(model) as engine:
            *_, last = [delta async for delta in engine.submit(prompt, params, prompt="Lily saw")]
        assert last.output is not None
        return last.output

    output = asyncio.run(main())
    assert output.outputs == llm.generate("Lily saw", params)[0].outputs
