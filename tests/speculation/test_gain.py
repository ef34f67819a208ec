"""Drafts are verified where more tokens come in a second."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.plan import StepShape
from jaxserve.speculation.gain import Acceptance, Slowness, StepKind, StepSeconds, worthwhile_counts


@given(
    sequences=st.lists(st.tuples(st.floats(0.05, 0.95), st.integers(1, 3)), min_size=1, max_size=3),
    max_drafts=st.integers(0, 9),
    num_more=st.integers(0, 3),
    times=st.lists(st.floats(0.1, 4.0), min_size=10, max_size=10).map(sorted),
)
def test_no_other_choice_brings_more_tokens_a_second(
    sequences: list[tuple[float, int]], max_drafts: int, num_more: int, times: list[float]
) -> None:
    rates, lengths = zip(*sequences, strict=True)
    num_decoding = len(rates) + num_more

    def speed(counts: tuple[int, ...]) -> float:
        chances = [rate**place for rate, n in zip(rates, counts, strict=True) for place in range(1, n + 1)]
        return (num_decoding + sum(chances)) / times[sum(counts)]

    chosen = worthwhile_counts(
        rates, lengths, max_drafts, lambda number, longest: times[number], num_decoding=num_decoding
    )
    possible = itertools.product(*(range(length + 1) for length in lengths))
    best = max(speed(counts) for counts in possible if sum(counts) <= max_drafts)
    assert sum(chosen) <= max_drafts
    assert speed(tuple(chosen.tolist())) == pytest.approx(best)


def test_where_rows_are_free_all_are_verified_and_where_they_are_dear_none() -> None:
    rates, lengths = [0.3, 0.6], [4, 2]
    free = worthwhile_counts(rates, lengths, 9, lambda *_: 1.0, num_decoding=2)
    dear = worthwhile_counts(rates, lengths, 9, lambda number, longest: 1.0 + number, num_decoding=2)
    assert (free.tolist(), dear.tolist()) == ([4, 2], [0, 0])


def test_acceptance_begins_with_what_others_have_shown_and_follows_what_it_sees() -> None:
    one = Acceptance()
    assert one.rate(0.4) == 0.4
    for _ in range(40):
        one.observe(3, 3)
    assert one.rate(0.4) > 0.95
    for _ in range(40):
        one.observe(3, 1)  # One right, one wrong, one that nobody will know of.
    assert one.rate(0.4) == pytest.approx(0.5, abs=0.02)


def test_shapes_that_nobody_has_seen_lie_between_their_neighbours_or_are_tried() -> None:
    seconds = StepSeconds()
    one, four, nine = (StepKind(StepShape(rows, rows, rows)) for rows in (1, 4, 9))
    assert seconds.predict(four) == 0.0
    for shape, taken in [(one, 2.0), (nine, 10.0)]:
        seconds.observe(shape, 99.0)  # It warms up.
        assert seconds.predict(shape) == (2.0 if shape is nine else 0.0)
        seconds.observe(shape, taken)
    assert [seconds.predict(shape) for shape in (one, four, nine)] == [2.0, 5.0, 10.0]


def test_how_fast_the_machine_is_now_holds_for_all_kinds() -> None:
    slowness = Slowness()
    one, other = StepSeconds(slowness), StepSeconds(slowness)
    few, many = (StepKind(StepShape(rows, rows, rows)) for rows in (1, 8))
    for _ in range(20):
        one.observe(few, 2.0)
        other.observe(many, 3.0)
    for _ in range(20):
        other.observe(many, 6.0)
    assert one.predict(few) == pytest.approx(4.0)
    assert other.predict(many) == pytest.approx(6.0)


def test_a_shape_that_met_a_pause_is_tried_again() -> None:
    seconds = StepSeconds()
    one, four, nine = (StepKind(StepShape(rows, rows, rows)) for rows in (1, 4, 9))
    for shape, taken in [(one, 2.0), (four, 20.0), (nine, 10.0)]:
        for _ in range(2):
            seconds.observe(shape, taken)
    assert [seconds.predict(shape) for shape in (one, four, nine)] == [2.0, 10.0, 10.0]


def test_a_pause_teaches_little_and_a_lasting_change_is_learnt() -> None:
    seconds, shape = StepSeconds(), StepKind(StepShape(4, 4, 4))
    for _ in range(20):
        seconds.observe(shape, 6.0)
    seconds.observe(shape, 6000.0)
    assert seconds.predict(shape) < 7.0
    for _ in range(60):
        seconds.observe(shape, 3.0)
    assert seconds.predict(shape) == pytest.approx(3.0, abs=0.01)
