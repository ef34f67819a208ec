"""Every family against the stored answers of transformers: logits, log-probabilities, greedy tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.engine.parameters import place_parameters
from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from jaxserve.weights import open_checkpoint
from tests.engine.forward import PromptForward
from tests.engine.models import serve, small_engine
from tests.oracle.cases import OracleCase, load_cases
from tests.oracle.tiny_models import TINY_MODELS, write_tiny_model


@pytest.fixture(scope="module", params=TINY_MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def test_logits_of_a_ragged_batch_are_those_of_transformers(model: tuple[str, Path]) -> None:
    name, folder = model
    cases = load_cases(name).cases
    checkpoint = open_checkpoint(folder)
    params = place_parameters(checkpoint.read("float32"), checkpoint.config, "switched")
    logits = PromptForward(checkpoint.config, [case.prompt_ids for case in cases]).logits(params)
    for case, ours in zip(cases, logits, strict=True):
        np.testing.assert_allclose(ours[case.positions], case.logits, atol=1e-4, rtol=0)


def test_greedy_answers_are_those_of_transformers_alone_and_together(model: tuple[str, Path]) -> None:
    name, folder = model
    cases = load_cases(name).cases
    engine = small_engine(folder)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    requests = [(case.prompt_ids.tolist(), params) for case in cases]
    for together in (False, True):
        outputs = serve(HostLoop(engine), requests, together)
        for case, output in zip(cases, outputs, strict=True):
            answer = output.outputs[0]
            assert answer.token_ids == case.greedy_ids.tolist()
            assert answer.logprobs is not None
            ours = [row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            np.testing.assert_allclose(ours, case.greedy_logprobs, atol=1e-4, rtol=0)
            assert_prompt_logprobs(output.prompt_logprobs, case)
    assert engine.compiles_after_ready == 0


def assert_prompt_logprobs(ours: object, case: OracleCase) -> None:
    assert isinstance(ours, list)
    assert ours[0] is None
    tokens = case.prompt_ids.tolist()
    scored = [row[token].logprob for row, token in zip(ours[1:], tokens[1:], strict=True)]
    np.testing.assert_allclose(scored, -case.nll, atol=1e-4, rtol=0)
