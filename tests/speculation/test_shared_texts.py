"""Answers that others are drafted from: whose they are, how many are kept, and which draft wins."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.speculation import NgramDrafter, SharedTexts, Speculation
from jaxserve.speculation.shared_texts import DEPTH, SharedDrafter


def filled(texts: list[tuple[str, list[int]]], max_tokens: int = 1000) -> SharedTexts:
    shared = SharedTexts(max_tokens)
    for scope, tokens in texts:
        shared.add(scope, [], tokens)
    shared.work(max_tokens)
    return shared


TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(
    events=st.lists(st.tuples(st.sampled_from("abc"), TOKENS, st.integers(0, 20)), max_size=12),
    question=TOKENS,
)
def test_an_audience_is_drafted_as_if_there_were_no_others(
    events: list[tuple[str, list[int], int]], question: list[int]
) -> None:
    shared = SharedTexts(10**6)
    alone = {scope: SharedTexts(10**6) for scope in "abc"}
    for scope, tokens, num_places in events:
        shared.add(scope, [], tokens)
        alone[scope].add(scope, [], tokens)
        shared.work(num_places)
    shared.work(10**6)
    for scope, own in alone.items():
        own.work(10**6)
        assert shared.look_up(scope, question, 1, 5) == own.look_up(scope, question, 1, 5)
    shared.clear("a")
    assert shared.look_up("a", question, 1, 5) == (0, [])
    assert shared.look_up("b", question, 1, 5) == alone["b"].look_up("b", question, 1, 5)


@given(
    limit=st.integers(1, 40),
    events=st.lists(
        st.tuples(
            st.sampled_from(["add a", "add b", "work", "clear a", "clear all"]), TOKENS, st.integers(0, 20)
        ),
        max_size=30,
    ),
)
def test_memory_is_bounded_whatever_comes(limit: int, events: list[tuple[str, list[int], int]]) -> None:
    shared = SharedTexts(limit)
    for event, tokens, number in events:
        what, _, scope = event.partition(" ")
        if what == "add":
            shared.add(scope, tokens, tokens[:number])
        elif what == "work":
            shared.work(number)
        else:
            shared.clear(None if scope == "all" else scope)
        assert 0 <= shared.num_findable <= limit
        assert 0 <= shared.num_waiting <= limit
        assert shared.num_nodes <= 2 * shared.num_findable
    shared.clear()
    assert (shared.num_findable, shared.num_waiting, shared.num_nodes) == (0, 0, 0)


def test_the_oldest_are_forgotten_first() -> None:
    shared = SharedTexts(100)
    texts = [[100 * number + place for place in range(27)] for number in range(9)]
    for number, tokens in enumerate(texts):
        shared.add("ab"[number % 2], [], tokens)
        shared.work(1000)
    found = [shared.look_up("ab"[number % 2], tokens[:4], 1, 2)[1] for number, tokens in enumerate(texts)]
    assert found == [[]] * 5 + [tokens[4:6] for tokens in texts[5:]]
    assert shared.num_findable == 100


def test_texts_are_found_when_work_has_come_to_them() -> None:
    shared = SharedTexts(1000)
    shared.add("a", [1, 2, 3], [4, 5, 6])
    assert shared.look_up("a", [1, 2], 1, 9) == (0, [])
    assert shared.num_waiting == 4
    shared.work(1)
    assert shared.look_up("a", [1, 2], 1, 9) == (2, [3, 4, 5, 6])
    assert shared.look_up("a", [2, 3], 1, 9) == (0, [])
    shared.work(99)
    assert shared.look_up("a", [9, 2, 3], 1, 2) == (2, [4, 5])
    assert shared.look_up("a", [9, 9, 3], 1, 2) == (0, []), "one token is too little"
    assert shared.look_up("a", [5, 6], 1, 2) == (0, []), "nothing followed"


def test_of_a_prompt_its_end_is_kept() -> None:
    shared = SharedTexts(1000)
    prompt = list(range(500))
    shared.add("a", prompt, [900, 901])
    shared.work(1000)
    assert shared.num_findable == DEPTH - 1
    assert shared.look_up("a", prompt, 1, 9) == (DEPTH - 1, [900, 901])
    assert shared.look_up("a", prompt[:400], 1, 9) == (0, [])


def test_the_longer_agreement_drafts() -> None:
    random = Random(1)
    text = [random.randrange(50) for _ in range(40)]
    drafter = SharedDrafter(filled([("a", text)]), "a")
    assert drafter.propose(text[:10], 3) == text[10:13]
    few = drafter.grade
    # Its own text goes on otherwise after the same ten tokens, which comes later and agrees as far.
    assert drafter.propose([91, 92, 93, *text[:10]], 3) == [91, 92, 93]
    assert drafter.grade == 4
    assert drafter.propose(text[10:20], 3) == text[20:23], "twenty tokens agree with the other one's"
    assert drafter.grade > few > NgramDrafter().grade + 4


def test_nothing_shared_leaves_the_drafts_of_the_own_text() -> None:
    text = [1, 2, 3, 1, 2]
    drafter = SharedDrafter(filled([("b", [1, 2, 9, 9])]), "a")
    own = NgramDrafter()
    assert drafter.propose(text, 4) == own.propose(text, 4) == [3, 1, 2, 3]
    assert drafter.grade == own.grade == 2


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens of shared texts"):
        SharedTexts(0)
    with pytest.raises(ValueError, match="shared_tokens -1"):
        Speculation(drafter=NgramDrafter, max_drafts=3, shared_tokens=-1)
    with pytest.raises(ValueError, match="shared_tokens 5: from 0 up, and 0 unless NgramDrafter drafts"):
        Speculation(drafter=lambda: NgramDrafter(1, 2), max_drafts=3, shared_tokens=5)
