"""The generated retrieval test."""

from __future__ import annotations

import pytest

from jaxserve.evaluation import make_needles
from jaxserve.evaluation.judging import is_exact


def count_words(text: str) -> int:
    return len(text.split())


def test_the_same_seed_hides_the_same_needles() -> None:
    first, again = (make_needles(count_words, [60, 200], num_depths=3, seed=4) for _ in range(2))
    assert first == again
    other = make_needles(count_words, [60, 200], num_depths=3, seed=5)
    assert all(one.case != two.case for one, two in zip(first, other, strict=True))


def test_a_grid_of_lengths_and_depths() -> None:
    needles = make_needles(count_words, [60, 400], num_depths=5)
    assert [(needle.length, needle.depth) for needle in needles] == [
        (length, depth) for length in (60, 400) for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    for needle in needles:
        (message,) = needle.case.messages
        text = str(message["content"])
        assert needle.length - 12 <= count_words(text) <= needle.length
        assert needle.case.answer is not None
        before, _, after = text.partition(needle.case.answer)
        assert needle.case.answer not in after
        haystack = count_words(before) + count_words(after.partition("\n\n")[0])
        assert count_words(before) / haystack == pytest.approx(
            needle.depth, abs=0.25 if haystack < 90 else 0.06
        )
        assert is_exact(f"The number is {needle.case.answer}.", needle.case.answer)
        assert needle.case.slice == f"needle/{needle.length}"


def test_one_depth_is_the_middle() -> None:
    assert [needle.depth for needle in make_needles(count_words, [80], num_depths=1)] == [0.5]


@pytest.mark.parametrize(("length", "num_depths", "message"), [(10, 5, "10 tokens"), (80, 0, "0 depths")])
def test_what_cannot_be_hidden_is_refused(length: int, num_depths: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_needles(count_words, [length], num_depths=num_depths)
