"""Prompt lookup against a plain search of the whole text."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.speculation import NgramDrafter, Speculation


def naive(text: list[int], min_ngram: int, max_ngram: int, max_tokens: int) -> list[int]:
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends:
            followers = [text[end] for end in ends]
            # Of endings of one token what came most often, of longer ones what came last.
            end = max(ends, key=lambda end: (followers.count(text[end]) if size == 1 else 0, end))
            grown = list(text)
            for index in range(max_tokens):
                grown.append(grown[end + index])
            return grown[len(text) :]
    return []


@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=2).map(sorted),
    max_tokens=st.integers(1, 9),
)
def test_as_a_search_of_the_whole_text(parts: list[list[int]], sizes: list[int], max_tokens: int) -> None:
    drafter = NgramDrafter(*sizes)
    text: list[int] = []
    for part in parts:
        text += part
        assert drafter.propose(part, max_tokens) == naive(text, sizes[0], sizes[1], max_tokens)


def test_the_longest_ending_wins_over_the_latest() -> None:
    assert NgramDrafter(1, 3).propose([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 2) == [7, 9]
    assert NgramDrafter(1, 1).propose([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 2) == [8, 1]


def test_after_a_single_token_the_usual_one_is_drafted() -> None:
    assert NgramDrafter().propose([1, 2, 9, 1, 2, 8, 1, 3, 4, 1], 2) == [2, 8]


def test_a_period_is_drafted_beyond_the_end_of_the_text() -> None:
    assert NgramDrafter().propose([5, 6, 7, 5, 6, 7, 5, 6], 7) == [7, 5, 6, 7, 5, 6, 7]


def test_nothing_to_go_by() -> None:
    assert NgramDrafter(2, 3).propose([1, 2, 3, 2], 4) == []
    assert NgramDrafter().propose([], 4) == []


@pytest.mark.parametrize("sizes", [(0, 2), (3, 2)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 <= min <= max"):
        NgramDrafter(*sizes)


def test_drafts_of_no_token_are_refused() -> None:
    with pytest.raises(ValueError, match="max_drafts 0 is below 1"):
        Speculation(drafter=NgramDrafter, max_drafts=0)
