from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text import StopStringMatcher

PROPERTY = settings(max_examples=500, derandomize=True, deadline=None, database=None)
PIECES = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def cut_at_first_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def possible_start(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that begins some stop string."""
    return max(
        size
        for size in range(len(text) + 1)
        if size == 0 or any(stop.startswith(text[-size:]) and size < len(stop) for stop in stops)
    )


@PROPERTY
@given(pieces=PIECES, stops=STOPS, include=st.booleans())
def test_any_split_shows_the_text_up_to_the_first_stop(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopStringMatcher(stops, include=include)
    shown = "".join(matcher.push(piece)[0] for piece in pieces) + matcher.finish()
    assert (shown, matcher.matched) == cut_at_first_stop("".join(pieces), stops, include)


@PROPERTY
@given(pieces=PIECES, stops=STOPS)
def test_exactly_the_longest_partial_match_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        seen, shown = seen + piece, shown + text
        if matched is not None:
            break
        assert shown == seen[: len(seen) - possible_start(seen, stops)]


@pytest.mark.parametrize(
    ("include", "shown"), [(False, "one "), (True, "one </end>")], ids=["excluded", "included"]
)
def test_nothing_comes_after_a_stop(include: bool, shown: str) -> None:
    matcher = StopStringMatcher(["</end>"], include=include)
    assert matcher.push("one </en") == ("one ", None)
    assert matcher.push("d> two") == (shown.removeprefix("one "), "</end>")
    assert matcher.push(" three") == ("", "</end>")
    assert matcher.finish() == ""


def test_the_match_that_ends_first_counts_and_of_those_the_longest() -> None:
    assert StopStringMatcher(["abcdef", "cd"]).push("abcdef") == ("ab", "cd")
    assert StopStringMatcher(["b", "ab"]).push("xab") == ("x", "ab")


def test_a_broken_off_match_is_released_at_once() -> None:
    matcher = StopStringMatcher(["aab"])
    assert matcher.push("aa") == ("", None)
    assert matcher.push("a") == ("a", None)
    assert matcher.push("x") == ("aax", None)


def test_without_stops_text_passes() -> None:
    matcher = StopStringMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.finish() == ""


def test_a_long_stop_and_a_long_text_cost_linear_time() -> None:
    matcher = StopStringMatcher(["a" * 20_000 + "b"])
    shown = "".join(matcher.push("aa")[0] for _ in range(20_000))
    assert len(shown) == 20_000
    assert matcher.push("b") == ("", "a" * 20_000 + "b")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["end", ""])
