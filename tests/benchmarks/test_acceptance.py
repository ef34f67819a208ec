"""How often samples with the same noise agree: the sampler, what should come out of it, the known bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.acceptance import sampling_rows_of, shared_noise_agreement, standard_agreement
from jaxserve.engine.sampling import draw, truncate
from jaxserve.engine.slots import seed_words
from jaxserve.plan import SamplingParams

NUM_DRAWS = 20_000


def stated(p: np.ndarray, q: np.ndarray) -> float:
    """The sum over tokens as the theorem has it (Daliri et al. 2024), pair by pair."""
    return sum(
        1.0 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p)))
        for i in range(len(p))
        if p[i] > 0.0 and q[i] > 0.0
    )


def logits_of(case: int) -> np.ndarray:
    """[2, V] of two models: near each other, apart, sharing half of their tokens, and nothing."""
    rng = np.random.default_rng(case)
    spread, apart = [(2.0, 0.3), (1.0, 2.0), (3.0, 1.0), (0.5, 4.0)][case]
    first = rng.normal(0.0, spread, 40)
    both = np.stack([first, first + rng.normal(0.0, apart, 40)])
    if case == 2:
        both[0, :20], both[1, 10:30] = -np.inf, -np.inf
    return both.astype(np.float32)


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.02),
    ],
    ids=["1", "0.6", "1.3, top-p", "top-k, min-p"],
)
def test_the_sampler_agrees_with_itself_as_often_as_it_can(case: int, params: SamplingParams) -> None:
    logits = logits_of(case)
    rows = sampling_rows_of(params, seed_words(case, 0), jnp.arange(NUM_DRAWS, dtype=jnp.int32))
    sampled = jax.jit(draw)
    first, second = (
        np.asarray(sampled(jnp.broadcast_to(one, (NUM_DRAWS, len(one))), rows)) for one in logits
    )
    two = sampling_rows_of(params, seed_words(0, 0), jnp.arange(2, dtype=jnp.int32))
    p, q = np.asarray(jax.nn.softmax(truncate(jnp.asarray(logits), two), axis=-1), np.float64)
    agreed, expected, standard = np.mean(first == second), stated(p, q), standard_agreement(p, q)

    assert shared_noise_agreement(p, q) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    tolerance = 4.5 * np.sqrt(max(expected * (1.0 - expected), 1e-4) / NUM_DRAWS)
    assert agreed == pytest.approx(expected, abs=tolerance)
    assert agreed <= standard + tolerance, "no coupling surpasses the standard rule"
    assert agreed >= standard / (2.0 - standard) - tolerance, "the bound for shared noise"
    # Each sample is its own distribution's.
    for tokens, one in ((first, p), (second, q)):
        shares = np.bincount(tokens, minlength=len(one)) / NUM_DRAWS
        assert np.abs(shares - one).max() < 4.5 * np.sqrt(0.25 / NUM_DRAWS)


def test_the_bounds_hold_for_any_two_distributions_and_are_reached() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        p, q = (rng.dirichlet(np.full(30, rng.choice([0.05, 0.3, 3.0]))) for _ in range(2))
        p[rng.integers(0, 30, 5)] = 0.0
        p /= p.sum()
        shared, standard = shared_noise_agreement(p, q), standard_agreement(p, q)
        assert shared == pytest.approx(stated(p, q), rel=1e-9)
        assert standard / (2.0 - standard) - 1e-12 <= shared <= standard + 1e-12
        assert shared_noise_agreement(q, p) == pytest.approx(shared, rel=1e-9)
        assert shared_noise_agreement(p, p) == pytest.approx(1.0)
    # What two have in common is one token; for the rest each has a token of its own.
    p, q = np.array([0.4, 0.6, 0.0]), np.array([0.4, 0.0, 0.6])
    assert shared_noise_agreement(p, q) == pytest.approx(0.4 / 1.6)
    assert shared_noise_agreement(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0.0
