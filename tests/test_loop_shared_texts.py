"""Answers drafted from others' in the host loop: whose, which, and that no token changes."""

from __future__ import annotations

import pytest

from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import CacheScope, ServiceTerms
from jaxserve.speculation import NgramDrafter, Speculation
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_sequence import expected_answer

LIMITS = make_limits(num_slots=4, max_model_len=512, num_pages=(600,), max_drafts=4)
PROMPT = list(range(20, 50))
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
ANSWER = expected_answer(LIMITS, PROMPT, PARAMS, 1)[0]


def make_loop(shared_tokens: int = 1000, *, overlap: bool = True) -> HostLoop:
    speculation = Speculation(drafter=NgramDrafter, max_drafts=4, adaptive=False, shared_tokens=shared_tokens)
    return HostLoop(FakeEngine(LIMITS), overlap=overlap, speculation=speculation)


def num_accepted(loop: HostLoop, terms: ServiceTerms, name: str = "a") -> int:
    """Answer the one question; of the drafts of this answer, how many were right."""
    loop.add(name, PROMPT, PARAMS, terms=terms)
    (output,) = [delta.output for delta in loop.run_until_idle() if delta.output is not None]
    assert output.outputs[0].token_ids == ANSWER
    loop.check_integrity()
    return output.drafts.num_accepted


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_question_is_drafted_from_the_answer_before(overlap: bool) -> None:
    loop = make_loop(overlap=overlap)
    alone, again = (num_accepted(loop, ServiceTerms()) for _ in range(2))
    assert alone < 15
    assert again > 40
    without = make_loop(0, overlap=overlap)
    assert [num_accepted(without, ServiceTerms()) for _ in range(2)] == [alone, alone]


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        (ServiceTerms(tenant="a"), ServiceTerms(tenant="a"), True),
        (ServiceTerms(tenant="a"), ServiceTerms(tenant="b"), False),
        (ServiceTerms(tenant="a", namespace="x"), ServiceTerms(tenant="a"), False),
        (ServiceTerms(tenant="x"), ServiceTerms(namespace="x"), False),
        (ServiceTerms(tenant="a", namespace="x"), ServiceTerms(tenant="b", namespace="x"), True),
        (ServiceTerms(cache_write=False), ServiceTerms(), False),
        (ServiceTerms(), ServiceTerms(cache_read=False), False),
        (ServiceTerms(), ServiceTerms(cache_write=False), True),
    ],
)
def test_texts_are_shared_as_prefixes_are(first: ServiceTerms, second: ServiceTerms, shares: bool) -> None:
    alone = num_accepted(make_loop(0), ServiceTerms())
    loop = make_loop()
    assert num_accepted(loop, first) == alone
    again = num_accepted(loop, second)
    assert again > 40 if shares else again == alone


def test_what_is_cleared_drafts_nothing_more() -> None:
    alone = num_accepted(make_loop(0), ServiceTerms())
    loop = make_loop()
    num_accepted(loop, ServiceTerms(tenant="a"))
    num_accepted(loop, ServiceTerms(tenant="b"))
    loop.clear_prefix_cache(CacheScope("tenant", "a"))
    assert num_accepted(loop, ServiceTerms(tenant="b")) > 40
    assert num_accepted(loop, ServiceTerms(tenant="a")) == alone
    loop.clear_prefix_cache()
    assert num_accepted(loop, ServiceTerms(tenant="b")) == alone


def test_an_answer_that_was_cut_off_is_not_shared() -> None:
    alone = num_accepted(make_loop(0), ServiceTerms())
    loop = make_loop()
    loop.add("cut", PROMPT, PARAMS)
    for _ in range(8):
        loop.step()
    assert loop.abort("cut")
    assert [delta.request_id for delta in loop.run_until_idle()] == ["cut"]
    assert num_accepted(loop, ServiceTerms()) == alone


def test_many_answers_side_by_side_share_and_none_changes() -> None:
    loop = make_loop(300)  # Fewer tokens than there are answers' worth: the oldest are forgotten on the way.
    expected: dict[str, list[list[int]]] = {}
    for number in range(24):
        params = SamplingParams(n=1 + number % 3, max_tokens=20 + number, ignore_eos=True, seed=number % 4)
        prompt, seed = PROMPT[: 10 + number % 2], number % 4
        terms = ServiceTerms(tenant="ab"[number % 2])
        loop.add(str(number), prompt, params, terms=terms)
        expected[str(number)] = [
            expected_answer(LIMITS, prompt, params, seed, index)[0] for index in range(params.n)
        ]
    found = {d.request_id: d.output for d in loop.run_until_idle() if d.output is not None}
    assert {name: [s.token_ids for s in output.outputs] for name, output in found.items()} == expected
    standing = loop.snapshot().speculation
    assert standing is not None
    assert standing.num_accepted > 100
