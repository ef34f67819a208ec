"""Real weights against golden answers: SmolLM2, stories260K and its exact mixture-of-experts rewrites."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxserve.engine.engine import DeviceEngine
from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.text import AnswerText, Tokenizer
from jaxserve.weights import open_checkpoint, pull
from tests.engine.models import serve, small_engine
from tests.oracle.cases import load_smollm2

MARGIN = 1e-3
"""Rounding may choose otherwise once the two best logits are closer than this."""
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def num_exact(margins: Sequence[float]) -> int:
    below = np.flatnonzero(np.asarray(margins) < MARGIN)
    return int(below[0]) if below.size else len(margins)


def mean_nll(output: RequestOutput) -> float:
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return -float(np.mean([row[token].logprob for row, token in rows if row is not None]))


STORIES = ["stories260K/hf", "stories260K_moe/split4_top4", "stories260K_moe/copies4_top2"]


@pytest.mark.parametrize("model", STORIES)
def test_stories_are_told_as_transformers_tells_them(model: str, shared_data: Path) -> None:
    golden = json.loads((shared_data / "golden" / "stories260K.json").read_text())
    folder = shared_data / "models" / model
    engine = small_engine(folder, max_model_len=512, num_pages=140)
    text = functools.partial(AnswerText, Tokenizer.from_folder(folder))
    requests = [(case["prompt_ids"], greedy(len(case["output_ids"]))) for case in golden["cases"]]
    for together in (False, True):
        outputs = serve(HostLoop(engine, answer_text=text), requests, together)
        for case, output in zip(golden["cases"], outputs, strict=True):
            exact = num_exact(case["top2_margin"])
            assert output.outputs[0].token_ids[:exact] == case["output_ids"][:exact]
            if exact == len(case["output_ids"]):
                assert output.outputs[0].text.strip() == case["text"].strip()
    (scored,) = serve(HostLoop(engine), [(golden["nll"]["ids"], SCORED)])
    assert mean_nll(scored) == pytest.approx(golden["nll"]["mean_nll"], abs=1e-3)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[DeviceEngine, Tokenizer]]:
    path = pull("smollm2-135m", progress=False)
    engine = small_engine(path, max_model_len=1024, num_pages=160, num_slots=6, decode_rows=(6,))
    yield engine, Tokenizer.from_gguf(open_checkpoint(path).metadata or {})
    assert engine.compiles_after_ready == 0


@pytest.mark.real
def test_smollm2_answers_as_transformers(smollm2: tuple[DeviceEngine, Tokenizer]) -> None:
    engine, tokenizer = smollm2
    stored = load_smollm2()
    requests = []
    for case in stored.cases:
        if case.messages is not None:
            prompt = tokenizer.apply_chat_template(list(case.messages))
        else:
            prompt = tokenizer.encode(case.text or "")
        assert prompt == case.prompt_ids.tolist()
        requests.append((prompt, greedy(len(case.greedy_ids))))
    outputs = serve(HostLoop(engine), requests)
    for case, output in zip(stored.cases, outputs, strict=True):
        exact = case.num_exact()
        assert output.outputs[0].token_ids[:exact] == case.greedy_ids[:exact].tolist()
    assert tokenizer.encode(stored.nll_text) == stored.nll_ids.tolist()
    (scored,) = serve(HostLoop(engine), [(stored.nll_ids.tolist(), SCORED)])
    assert mean_nll(scored) == pytest.approx(float(stored.nll.mean()), abs=1e-3)


@pytest.mark.real
def test_smollm2_gives_the_golden_answers(smollm2: tuple[DeviceEngine, Tokenizer], shared_data: Path) -> None:
    engine, tokenizer = smollm2
    golden = json.loads((shared_data / "golden" / "smollm2.json").read_text())
    requests = [(case["prompt_ids"], greedy(len(case["output_ids"]))) for case in golden["cases"]]
    text = functools.partial(AnswerText, tokenizer)
    outputs = serve(HostLoop(engine, answer_text=text), requests)
    for case, output in zip(golden["cases"], outputs, strict=True):
        exact = num_exact(case["top2_margin"])
        assert output.outputs[0].token_ids[:exact] == case["output_ids"][:exact]
    (scored,) = serve(HostLoop(engine), [(golden["nll"]["ids"], SCORED)])
    assert mean_nll(scored) == pytest.approx(golden["nll"]["mean_nll"], abs=1e-3)
