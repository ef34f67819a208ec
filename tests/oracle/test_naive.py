"""The plain transform: hand-computed rows, and transformers' own processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.plan import SamplingParams
from tests.oracle.naive import probabilities, transform_logits

INF = np.inf


def transform(
    logits: list[float],
    prompt_ids: tuple[int, ...] = (),
    output_ids: tuple[int, ...] = (),
    eos_ids: tuple[int, ...] = (),
    **params: Any,
) -> list[float]:
    return transform_logits(logits, SamplingParams(**params), prompt_ids, output_ids, eos_ids).tolist()


def test_the_defaults_change_nothing() -> None:
    assert transform([3.0, 1.0, 2.0, -1.0]) == [3.0, 1.0, 2.0, -1.0]


def test_the_input_is_left_alone() -> None:
    logits = np.array([3.0, 1.0])
    transform_logits(logits, SamplingParams(logit_bias={0: 1.0}, repetition_penalty=2.0), [0], [1])
    assert logits.tolist() == [3.0, 1.0]


def test_temperature_divides() -> None:
    assert transform([3.0, 1.0, -1.0], temperature=0.5) == [6.0, 2.0, -2.0]


def test_repetition_penalty_counts_prompt_and_answer_once() -> None:
    logits = transform([3.0, 1.0, -2.0, 4.0], prompt_ids=(0, 0), output_ids=(2, 2), repetition_penalty=2.0)
    assert logits == [1.5, 1.0, -4.0, 4.0]


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = transform(
        [3.0, 1.0, 2.0],
        prompt_ids=(0, 0),
        output_ids=(1, 2, 2),
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    assert logits == [3.0, 0.25, 1.0]


def test_bias_comes_before_penalties() -> None:
    assert transform([-1.0, 0.0], prompt_ids=(0,), logit_bias={0: 3.0}, repetition_penalty=2.0) == [1.0, 0.0]


def test_repetition_comes_before_presence() -> None:
    assert transform([4.0, 0.0], output_ids=(0,), repetition_penalty=2.0, presence_penalty=1.0)[0] == 1.0


def test_only_allowed_and_never_bad_tokens() -> None:
    logits = transform([3.0, 1.0, 2.0, 4.0], allowed_token_ids=[0, 1, 3], bad_token_ids=[3])
    assert logits == [3.0, 1.0, -INF, -INF]


@pytest.mark.parametrize(("num_output", "expected"), [(1, [1.0, -INF, -INF]), (2, [1.0, 2.0, 3.0])])
def test_min_tokens_forbids_ends_until_then(num_output: int, expected: list[float]) -> None:
    logits = transform(
        [1.0, 2.0, 3.0], output_ids=(0,) * num_output, eos_ids=(1,), stop_token_ids=[2], min_tokens=2
    )
    assert logits == expected


def test_greedy_skips_what_follows_the_forbidden_tokens() -> None:
    logits = transform([3.0, 1.0, 2.0], temperature=0.0, top_k=1, top_p=0.1, min_p=0.9, bad_token_ids=[1])
    assert logits == [3.0, -INF, 2.0]


def test_top_k_keeps_exactly_k_the_lowest_ids_of_equals() -> None:
    assert transform([1.0, 2.0, 2.0, 3.0, 2.0], top_k=3) == [-INF, 2.0, 2.0, 3.0, -INF]


@pytest.mark.parametrize("top_k", [-1, 0, 3, 99])
def test_top_k_without_effect(top_k: int) -> None:
    assert transform([1.0, 3.0, 2.0], top_k=top_k) == [1.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.001, [2]), (0.49, [2]), (0.51, [2, 0]), (0.74, [2, 0]), (0.8, [2, 0, 1]), (0.9, [2, 0, 1, 3])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: list[int]) -> None:
    row = np.log2([0.25, 0.125, 0.5, 0.125]) * np.log(2)
    logits = transform(row.tolist(), top_p=top_p)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == sorted(kept)


def test_top_p_takes_the_lowest_ids_of_equals() -> None:
    assert transform([0.0, 0.0, 0.0, 0.0], top_p=0.5) == [0.0, 0.0, -INF, -INF]


def test_top_p_sees_what_top_k_left() -> None:
    row = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    # Of the two that top-k leaves, the first has 4/7: more than a half, though less than one of all.
    assert np.isfinite(transform(row, top_k=2, top_p=0.5)).tolist() == [True, False, False, False]
    assert np.isfinite(transform(row, top_p=0.5)).tolist() == [True, True, False, False]


def test_min_p_is_a_fraction_of_the_most_likely() -> None:
    row = np.log([0.5, 0.3, 0.14, 0.06]).tolist()
    assert np.isfinite(transform(row, min_p=0.25)).tolist() == [True, True, True, False]
    assert np.isfinite(transform(row, min_p=1.0)).tolist() == [True, False, False, False]


def test_temperature_comes_before_top_p_and_min_p() -> None:
    row = np.log([0.5, 0.3, 0.14, 0.06]).tolist()
    # At temperature 1/2 the likelihoods are squared: 0.25, 0.09, 0.0196, 0.0036.
    assert np.isfinite(transform(row, temperature=0.5, min_p=0.3)).tolist() == [True, True, False, False]
    assert np.isfinite(transform(row, temperature=0.5, top_p=0.65)).tolist() == [True, False, False, False]


def test_forbidden_tokens_take_no_room() -> None:
    assert transform([5.0, 4.0, 3.0, 2.0], bad_token_ids=[0], top_k=2) == [-INF, 4.0, 3.0, -INF]


def test_no_token_left_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token is left"):
        transform([1.0, 2.0], allowed_token_ids=[0], bad_token_ids=[0])


def test_probabilities_of_masked_rows() -> None:
    assert probabilities(np.array([0.0, -INF, 0.0])).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:::torch", "ignore:::transformers")
@pytest.mark.parametrize(
    ("params", "processor", "argument"),
    [
        ({"repetition_penalty": 1.7}, "RepetitionPenaltyLogitsProcessor", 1.7),
        ({"repetition_penalty": 0.6}, "RepetitionPenaltyLogitsProcessor", 0.6),
        ({"temperature": 0.7}, "TemperatureLogitsWarper", 0.7),
        ({"top_k": 20}, "TopKLogitsWarper", 20),
        ({"top_p": 0.8}, "TopPLogitsWarper", 0.8),
        ({"min_p": 0.05}, "MinPLogitsWarper", 0.05),
    ],
)
def test_each_step_is_that_of_transformers(params: dict[str, Any], processor: str, argument: float) -> None:
    torch = pytest.importorskip("torch", reason="the oracle extra is not installed")
    generation = pytest.importorskip("transformers.generation", reason="the oracle extra is not installed")
    generator = np.random.default_rng(7)
    for _ in range(10):
        logits = generator.normal(scale=3.0, size=200)
        token_ids = generator.integers(0, 200, size=30)
        theirs = getattr(generation, processor)(argument)(
            torch.as_tensor(token_ids)[None], torch.as_tensor(logits)[None]
        )[0].numpy()
        ours = transform_logits(
            logits, SamplingParams(**params), token_ids[:20].tolist(), token_ids[20:].tolist()
        )
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
