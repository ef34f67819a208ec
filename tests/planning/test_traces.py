"""Traces in hand: windows, loads, tenants and classes, what could be shared; prompts made for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.planning import BLOCK_TOKENS, PromptMaker, Trace, TraceRequest


def request(
    arrival: float = 0.0, prompt: int = 10, output: int = 1, hashes: Sequence[int] = ()
) -> TraceRequest:
    return TraceRequest(
        arrival=arrival, prompt_tokens=prompt, output_tokens=output, prefix_hashes=tuple(hashes)
    )


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("made up", requests)


def test_a_window_starts_its_clock_anew_and_leaves_its_end_out() -> None:
    trace = trace_of(*(request(arrival) for arrival in (0.0, 1.0, 2.0, 3.0)))
    assert [r.arrival for r in trace.window(1.0, 2.0).requests] == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"no request between 4.0 and 5.0 s; it lasts 3.0 s"):
        trace.window(4.0, 1.0)


def test_load_quickens_arrivals_alone() -> None:
    trace = trace_of(request(0.0, 10, 2), request(10.0, 20, 3))
    quick = trace.scaled(20)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in quick.requests] == [
        (0.0, 10, 2),
        (0.5, 20, 3),
    ]
    with pytest.raises(ValueError, match="load 0 is not above 0"):
        trace.scaled(0)


def test_a_trace_is_in_order() -> None:
    with pytest.raises(ValueError, match="not in the order of their arrival"):
        trace_of(request(1.0), request(0.0))


def test_assignment_follows_the_shares_and_the_seed() -> None:
    trace = trace_of(*(request() for _ in range(2000)))
    shares = {"big": 3.0, "small": 1.0}
    assigned = trace.assigned(tenants=shares, priorities={"interactive": 0.5, "batch": 0.5}, seed=1)
    tenants = Counter(r.tenant for r in assigned.requests)
    assert tenants["big"] / 2000 == pytest.approx(0.75, abs=0.04)
    both = Counter((r.tenant, r.priority) for r in assigned.requests)
    assert both["big", "batch"] / 2000 == pytest.approx(0.375, abs=0.04)
    assert trace.assigned(tenants=shares, seed=2).assigned(tenants=shares, seed=1) == trace.assigned(
        tenants=shares, seed=1
    )
    assert trace.assigned(tenants=shares, seed=2) != trace.assigned(tenants=shares, seed=1)
    with pytest.raises(ValueError, match=r"tenant shares \{'a': 0.0\} are not all above 0"):
        trace.assigned(tenants={"a": 0.0})


def test_a_conversation_stays_with_one_tenant() -> None:
    trace = trace_of(*(request(0, 1024, 1, (0, 1 + number % 10)) for number in range(200)))
    assigned = trace.assigned(tenants={"a": 1, "b": 1})
    owners = {(r.prefix_hashes[1], r.tenant) for r in assigned.requests}
    assert len(owners) == 10
    assert {tenant for _, tenant in owners} == {"a", "b"}


def test_ideal_reuse_counts_only_what_came_before_and_from_the_start() -> None:
    trace = trace_of(
        request(0, 1024, 1, (1, 2)),  # nothing before it
        request(0, 1000, 1, (1, 3)),  # its first 512
        request(0, 800, 1, (1, 2)),  # all 800
        request(0, 1024, 1, (9, 2)),  # nothing: it begins differently
    )
    assert trace.ideal_reuse == (512 + 800) / (1024 + 1000 + 800 + 1024)


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length


SPELLING = 10
"""Tokens that the smallest vocabulary tried here, of 97 ids, takes to spell a hash."""

hashes = st.lists(st.integers(0, 3) | st.integers(0, 2**63 - 1), min_size=1, max_size=4)


@given(hashes, hashes, st.integers(1, BLOCK_TOKENS), st.sampled_from([97, 128256]))
def test_prompts_share_exactly_what_their_hashes_share(
    one: list[int], other: list[int], last: int, vocab_size: int
) -> None:
    maker = PromptMaker(vocab_size)
    prompts = [
        maker.prompt(request(0, BLOCK_TOKENS * (len(ids) - 1) + last, 1, ids), number)
        for number, ids in enumerate((one, other))
    ]
    shared_blocks = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        shared_blocks += 1
    shared = min(shared_blocks * BLOCK_TOKENS, *map(len, prompts))
    assert shared <= common_prefix(*prompts) <= shared + SPELLING
    for prompt in prompts:
        assert prompt.dtype == np.int32
        assert prompt.min() >= 1
        assert prompt.max() < vocab_size


def test_prompts_without_hashes_share_nothing_and_are_the_same_every_time() -> None:
    maker = PromptMaker(128256)
    requests = [request(0, 1500), request(0, 1500), request(0, 1500, 1, (0, 1, 2))]
    prompts = [maker.prompt(each, number) for number, each in enumerate(requests)]
    assert [len(prompt) for prompt in prompts] == [1500] * 3
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert common_prefix(prompts[first], prompts[second]) < 4
    again = PromptMaker(128256).prompt(requests[1], 1)
    assert np.array_equal(again, prompts[1])
    assert not np.array_equal(PromptMaker(128256, seed=1).prompt(requests[1], 1), prompts[1])


def test_a_vocabulary_that_cannot_spell_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 2 is below 3"):
        PromptMaker(2)
