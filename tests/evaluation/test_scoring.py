"""The scorer against stored answers of transformers, and against itself."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, OpenedModel, SamplingParams, open_model
from jaxserve.engine.options import EngineOptions
from jaxserve.evaluation import Side
from jaxserve.evaluation.scoring import Scorer, compare_distributions
from jaxserve.text.windows import Window, cut_windows
from jaxserve.weights import open_checkpoint
from tests.fake_model import BOS, byte_tokenizer
from tests.oracle.cases import load_cases
from tests.oracle.tiny_models import write_tiny_model

CHUNK = 16
TWO_SIZES = ("llama_mha", "llama_gqa_tied")


def tiny_side(name: str, tmp_path: Path, **options: object) -> Side:
    model = OpenedModel(open_checkpoint(write_tiny_model(name, tmp_path / name)), byte_tokenizer())
    settings = {"max_chunk": CHUNK, "num_slots": 1, "deterministic": True} | options
    return Side(name, model, EngineOptions(**settings))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    largest = logits.max(-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))


def test_distributions_are_compared_as_in_float64() -> None:
    rng = np.random.default_rng(0)
    model, reference = (rng.normal(0, 3, (7, 300)).astype(np.float32) for _ in range(2))
    model[3:5] = reference[3:5]
    target = rng.integers(0, 300, 7).astype(np.int32)
    scores = compare_distributions(jnp.asarray(model), jnp.asarray(reference), jnp.asarray(target))
    ours, theirs = log_softmax(model), log_softmax(reference)
    rows = np.arange(7)
    np.testing.assert_allclose(scores.model_nll, -ours[rows, target], rtol=1e-5)
    np.testing.assert_allclose(scores.reference_nll, -theirs[rows, target], rtol=1e-5)
    expected = (np.exp(theirs) * (theirs - ours)).sum(-1)
    np.testing.assert_allclose(scores.kl, expected, rtol=1e-4, atol=1e-6)
    assert np.asarray(scores.kl)[3:5].tolist() == [0.0, 0.0]
    assert np.asarray(scores.agrees).tolist() == (ours.argmax(-1) == theirs.argmax(-1)).tolist()


def test_a_model_that_is_broken_scores_no_number() -> None:
    broken = jnp.full((2, 5), jnp.nan)
    scores = compare_distributions(broken, jnp.zeros((2, 5)), jnp.zeros(2, jnp.int32))
    assert np.isnan(scores.kl).all()


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe"])
def test_likelihoods_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    cases = load_cases(name).cases[1:]  # The first has no token to score.
    side = tiny_side(name, tmp_path)
    scorer = Scorer(side, side, context=max(len(case.prompt_ids) for case in cases))
    seen: list[int] = []
    windows = [Window(case.prompt_ids) for case in cases]
    scores = scorer.score(windows, seen.append)
    expected = np.concatenate([case.nll for case in cases])
    np.testing.assert_allclose(scores.tokens.model_nll, expected, atol=1e-4, rtol=0)
    assert seen == [len(case.prompt_ids) - 1 for case in cases]
    # The same numbers from the same program: not close to 0, but 0.
    assert np.asarray(scores.tokens.kl).max() == 0.0
    assert np.asarray(scores.tokens.agrees).all()
    assert scores.model_seconds > 0
    assert scores.reference_seconds > 0


def test_divergence_of_two_models_is_that_of_transformers_logits(tmp_path: Path) -> None:
    ours, theirs = (load_cases(name).cases[-1] for name in ("qwen2", "qwen3"))
    assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
    scorer = Scorer(tiny_side("qwen2", tmp_path), tiny_side("qwen3", tmp_path), context=len(ours.prompt_ids))
    scores = scorer.score([Window(ours.prompt_ids)]).tokens
    model, reference = log_softmax(ours.logits[:-1]), log_softmax(theirs.logits[:-1])
    expected = (np.exp(reference) * (reference - model)).sum(-1)
    positions = ours.positions[:-1]  # After the last token of the prompt there is none to score.
    np.testing.assert_allclose(np.asarray(scores.kl)[positions], expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(scores.reference_nll, theirs.nll, atol=1e-4)
    agrees = model.argmax(-1) == reference.argmax(-1)
    assert np.asarray(scores.agrees)[positions].tolist() == agrees.tolist()


def test_int8_pages_score_as_the_engine_scores_them(tmp_path: Path, shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K" / "hf"
    settings = {"max_chunk": CHUNK, "num_slots": 2, "deterministic": True, "kv_format": "int8"}
    model = open_model(folder)
    ids = model.tokenizer.encode("Once upon a time there was a dog who liked to run in the park with Tom.")
    with LLM(model, progress=False, max_model_len=128, **settings) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([ids], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    expected = [-row[token].logprob for row, token in rows if row is not None]
    side = Side("int8", model, EngineOptions(**settings))  # type: ignore[arg-type]
    scores = Scorer(side, side, context=128).score([Window(np.asarray(ids, np.int32))]).tokens
    np.testing.assert_allclose(scores.model_nll, expected, rtol=1e-6, atol=1e-6)


def test_chunks_of_any_size_score_bitwise_alike(tmp_path: Path) -> None:
    (case,) = load_cases("llama_gqa_tied").cases[-1:]
    nll = []
    for chunk in (4, 32):
        side = tiny_side("llama_gqa_tied", tmp_path / str(chunk), max_chunk=chunk, kv_format="int8")
        scorer = Scorer(side, side, context=len(case.prompt_ids))
        nll.append(scorer.score([Window(case.prompt_ids)]).tokens.model_nll)
    np.testing.assert_array_equal(*nll)


def test_vocabularies_of_two_sizes_are_refused(tmp_path: Path) -> None:
    sizes = [open_checkpoint(write_tiny_model(name, tmp_path / name)).config.vocab_size for name in TWO_SIZES]
    sides = [tiny_side(name, tmp_path) for name in TWO_SIZES]
    with pytest.raises(ValueError, match=f"{sizes[0]} tokens and .* {sizes[1]}"):
        Scorer(*sides, context=8)


def test_a_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    side = tiny_side("llama_mha", tmp_path)
    with pytest.raises(ValueError, match="max_model_len 100000"):
        Scorer(side, side, context=100_000)


def test_windows_open_as_texts_do_and_hold_every_token_once() -> None:
    tokenizer = byte_tokenizer()
    text = "abcdefghij"
    windows = cut_windows(tokenizer, text, context=5)
    assert [window.token_ids[0] for window in windows] == [BOS] * 3
    assert [len(window.token_ids) for window in windows] == [5, 5, 3]
    ids = np.concatenate([window.token_ids[1:] for window in windows])
    assert tokenizer.decode(ids.tolist()) == text
    assert (
        sum(len(window.token_ids) - 1 for window in cut_windows(tokenizer, text, context=5, max_tokens=6))
        == 6
    )


@pytest.mark.parametrize(("text", "context"), [("abc", 1), ("", 5)])
def test_windows_that_score_nothing_are_refused(text: str, context: int) -> None:
    with pytest.raises(ValueError, match="to score"):
        cut_windows(byte_tokenizer(), text, context=context)
