"""Every family against the stored answers of transformers: logits, log-probabilities, greedy tokens."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import CacheConfig, EngineConfig
from jaxserve.engine.parameters import place_parameters
from jaxserve.loop import HostLoop
from jaxserve.model.cache import make_cache, page_layouts
from jaxserve.model.transformer import Rows, Transformer
from jaxserve.plan import SamplingParams
from jaxserve.weights import open_checkpoint
from tests.engine.models import serve, small_engine
from tests.oracle.cases import OracleCase, load_cases
from tests.oracle.tiny_models import TINY_MODELS, write_tiny_model

PAGE = 16


@pytest.fixture(scope="module", params=TINY_MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def test_logits_of_a_ragged_batch_are_those_of_transformers(model: tuple[str, Path]) -> None:
    name, folder = model
    cases = load_cases(name).cases
    logits = forward_prompts(folder, [case.prompt_ids for case in cases])
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


def forward_prompts(folder: Path, prompts: list[np.ndarray]) -> list[np.ndarray]:
    """[P, V] logits of each prompt, all in one ragged batch."""
    checkpoint = open_checkpoint(folder)
    pages_each = 8
    config = EngineConfig(
        model=checkpoint.config,
        cache=CacheConfig(
            page_size=PAGE, num_pages=(1 + pages_each * len(prompts),) * len(checkpoint.config.windows)
        ),
        max_model_len=pages_each * PAGE,
        num_slots=len(prompts),
        decode_rows=(len(prompts),),
        chunk_rows=(128,),
    )
    layouts = page_layouts(config, "cpu")
    transformer = Transformer(config, layouts, "switched")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    position = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    sequence = np.repeat(np.arange(len(prompts), dtype=np.int32), lengths)
    table = 1 + np.arange(len(prompts) * pages_each, dtype=np.int32).reshape(len(prompts), pages_each)
    rows = Rows(
        position_T=jnp.asarray(position),
        valid_T=jnp.ones(len(position), jnp.bool_),
        page_TG=(jnp.asarray(table[sequence, position // PAGE]),) * len(layouts),
        page_table=(jnp.asarray(table),) * len(layouts),
        query_start_S1=jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        context_len_S=jnp.asarray(lengths),
    )
    params = place_parameters(checkpoint.read("float32"), checkpoint.config, "switched")

    @jax.jit
    def run(tokens: jax.Array) -> jax.Array:
        hidden, _ = transformer.forward(params, make_cache(config, layouts), tokens, rows, single=False)
        return transformer.logits(params, hidden)

    logits = np.asarray(run(jnp.asarray(np.concatenate(prompts))))
    return np.split(logits, np.cumsum(lengths)[:-1])
