"""Made-up traffic has the means, the percentiles and the reuse that were asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.planning.workload import MOST_SPREAD, Lengths, Workload, at_once


def workload(reuse: float = 0.0) -> Workload:
    return Workload(prompt=Lengths(mean=1000, p95=2500), output=Lengths(mean=100, p95=200), reuse=reuse)


@given(mean=st.floats(20, 5000), spread=st.floats(1.0, 3.0))
def test_lengths_have_their_mean_and_percentile(mean: float, spread: float) -> None:
    lengths = Lengths(mean=mean, p95=spread * mean).sample(2000, np.random.default_rng(0))
    assert lengths.min() >= 1
    assert lengths.mean() == pytest.approx(mean, rel=0.05)
    assert np.percentile(lengths, 95) == pytest.approx(spread * mean, rel=0.05)


def test_equal_mean_and_percentile_are_one_length() -> None:
    assert set(Lengths(mean=64, p95=64).sample(10, np.random.default_rng(0)).tolist()) == {64}


def test_arrivals_are_one_a_second_and_the_same_for_a_seed() -> None:
    trace = workload().trace(200, longest=8192)
    assert trace.seconds == pytest.approx(200)
    assert trace == workload().trace(200, longest=8192)
    assert trace != workload().trace(200, longest=8192, seed=1)
    assert at_once(trace).seconds == 0.0
    assert [one.prompt_tokens for one in at_once(trace).requests] == [
        one.prompt_tokens for one in trace.requests
    ]


@pytest.mark.parametrize("reuse", [0.0, 0.25, 0.6])
def test_prompts_share_what_was_asked_for(reuse: float) -> None:
    assert workload(reuse).trace(600, longest=8192).ideal_reuse == pytest.approx(reuse, abs=0.05)


def test_short_prompts_share_all_or_nothing() -> None:
    short = Workload(prompt=Lengths(mean=100, p95=100), output=Lengths(mean=10, p95=10), reuse=0.5)
    requests = short.trace(400, longest=512).requests
    assert {len(one.prefix_hashes) for one in requests} == {1}
    assert sum(one.prefix_hashes == (1,) for one in requests) == pytest.approx(200, abs=30)


def test_the_longest_are_cut_and_no_more() -> None:
    requests = workload().trace(500, longest=2800).requests
    assert max(one.prompt_tokens + one.output_tokens for one in requests) == 2800
    with pytest.raises(ValueError, match=r"prompts of 2500 and answers of 200 tokens.* than the 2000 tokens"):
        workload().trace(10, longest=2000)


@pytest.mark.parametrize(
    ("mean", "p95", "complaint"),
    [
        (0.5, 1, "a mean length of 0.5 tokens is out of range"),
        (
            100,
            99,
            "a 95th percentile of 99 tokens with a mean of 100 is out of range: it must be from 100 to",
        ),
        (100, 100 * MOST_SPREAD + 1, "it must be from 100 to 387"),
    ],
)
def test_lengths_that_cannot_be(mean: float, p95: float, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Lengths(mean=mean, p95=p95)


@pytest.mark.parametrize("reuse", [-0.1, 1.0])
def test_reuse_that_cannot_be(reuse: float) -> None:
    with pytest.raises(ValueError, match=r"a reuse of .* is out of range"):
        workload(reuse)
