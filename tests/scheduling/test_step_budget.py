"""The prompt tokens of a step: what the answers beside them can bear, learnt from measured steps."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from jaxserve.scheduling.step_budget import StepTimes, TokenBudget
from tests.fake_limits import make_limits

LIMITS = make_limits(num_slots=32, chunk_rows=(64, 256, 1024))


def seconds(shape_rows: int) -> float:
    """A step of a machine: 5 ms, and 40 microseconds a row."""
    return 5e-3 + 40e-6 * shape_rows


def trained(budget: TokenBudget, num_steps: int = 200, seed: int = 0) -> TokenBudget:
    """Measurements with noise, and a pause of a second now and then."""
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        rows = int(rng.choice([64, 256, 1024]))
        pause = 1.0 if step % 50 == 49 else 0.0
        budget.observe(rows, rows, seconds(rows) * rng.uniform(0.95, 1.05) + pause)
    return budget


@pytest.mark.parametrize(("tpot", "rows"), [(0.008, 0), (0.0095, 54), (0.02, 246), (0.06, 1014), (inf, 1014)])
def test_the_largest_shape_that_keeps_the_target_filled_to_the_row(tpot: float, rows: int) -> None:
    assert trained(TokenBudget(LIMITS)).budget(10, tpot) == rows


def test_nobody_who_decodes_means_no_target() -> None:
    assert trained(TokenBudget(LIMITS)).budget(0, 1e-6) == 1024


def test_a_chunk_limit_picks_the_shape_that_it_fills() -> None:
    budget = trained(TokenBudget(LIMITS, max_chunk=64))
    assert budget.budget(10) == 54
    assert budget.budget(31) == 33
    assert trained(TokenBudget(LIMITS, max_chunk=200)).budget(10) == 200


def test_steps_keep_the_target_in_the_mean_where_shapes_lie_far_apart() -> None:
    """The largest shape takes 46 ms, the next 15; in the mean 36 are allowed, and never half as much more."""
    budget = trained(TokenBudget(LIMITS))
    rows = [budget.budget(10, 0.04) for _ in range(300)]
    assert rows[0] == 246, "nothing has been saved yet"
    assert set(rows) == {246, 1014}
    times = [seconds(row + 10) for row in rows]
    assert 0.9 * 0.036 < np.mean(times) < 1.02 * 0.036
    tight = [budget.budget(10, 0.03) for _ in range(100)]  # 46 is more than half beyond 27.
    assert set(tight[1:]) == {246}


def test_a_target_that_cannot_be_kept_pauses_prompts_but_never_for_long() -> None:
    limits = make_limits(num_slots=32, chunk_rows=(256, 1024))
    budget = trained(TokenBudget(limits, max_pause=3))
    assert [budget.budget(10, 0.008) for _ in range(9)] == [0, 0, 0, 246, 0, 0, 0, 246, 0]
    assert budget.budget(10, 0.02) == 246
    assert [budget.budget(10, 0.008) for _ in range(4)] == [0, 0, 0, 246]


def test_a_target_that_is_missed_without_prompts_lets_them_cost_half_as_much_again() -> None:
    assert trained(TokenBudget(LIMITS)).budget(10, 1e-4) == 54


def test_a_shape_with_next_to_no_room_is_not_worth_it() -> None:
    limits = make_limits(num_slots=61, chunk_rows=(64, 256, 1024))
    budget = trained(TokenBudget(limits, max_pause=1))
    assert budget.budget(60, 0.02) == 196
    assert [budget.budget(60, 0.009) for _ in range(2)] == [0, 196]
    full = TokenBudget(make_limits(num_slots=64, chunk_rows=(64,)))
    assert full.budget(63, 1.0) == 1
    assert full.budget(64, 1.0) == 0


def test_the_model_stands_noise_and_pauses_and_fills_in_the_unmeasured() -> None:
    times = trained(TokenBudget(LIMITS)).times
    for rows in (64, 256, 1024):
        assert times.predict(rows, rows) == pytest.approx(seconds(rows), rel=0.08)
    assert times.predict(512, 512) == pytest.approx(seconds(512), rel=0.15)


@pytest.mark.parametrize("own_shapes", [True, False])
def test_so_many_may_decode_side_by_side(own_shapes: bool) -> None:
    """A machine whose decode steps take 4 ms, and 0.1 ms for each row in use; it may have none but those of
    prompts for them, as in the shape-invariant mode."""
    limits = make_limits(num_slots=64, chunk_rows=(64, 256, 1024))
    if not own_shapes:
        ladder = (*(replace(shape, decode=False) for shape in limits.decode_shapes), *limits.chunk_shapes[1:])
        limits = replace(limits, decode_shapes=(), chunk_shapes=ladder)
    shapes = limits.decode_shapes or limits.chunk_shapes
    budget = TokenBudget(limits)
    assert budget.max_decoding(inf) == 64
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows = int(rng.integers(1, 65))
        shape = next(shape.rows for shape in shapes if shape.rows >= rows)
        budget.observe(shape, rows, 4e-3 + 1e-4 * rows)
    assert budget.max_decoding(0.0071 / 0.9) == pytest.approx(31, abs=2)
    assert budget.max_decoding(1.0) == 64
    assert budget.max_decoding(0.001) == 64, "it is missed by a single one already"


def test_a_lasting_change_is_learnt() -> None:
    times = trained(TokenBudget(LIMITS)).times
    for _ in range(100):
        times.observe(256, 256, 3 * seconds(256))
    assert times.predict(256, 256) == pytest.approx(3 * seconds(256), rel=0.1)


def test_before_anything_is_measured_more_rows_take_longer() -> None:
    times = StepTimes()
    predictions = [times.predict(rows, rows) for rows in (1, 64, 1024)]
    assert 0.0 < predictions[0] < predictions[1] < predictions[2]
    times.observe(64, 3, 0.010)
    assert times.predict(1024, 1024) >= times.predict(64, 64) > predictions[1]


def test_it_settles_on_the_target_from_nothing() -> None:
    """In closed loop, on a machine far from the prior, steps keep the target soon and stay at it."""
    budget = TokenBudget(LIMITS)
    times: list[float] = []
    for _ in range(100):
        rows = budget.budget(20, 0.2) + 20
        shape = next(shape.rows for shape in LIMITS.chunk_shapes if shape.rows >= rows)
        times.append(20 * seconds(shape) / 2)
        budget.observe(shape, rows, times[-1])
    assert sum(time > 0.2 for time in times) <= 5
    assert times[-1] == 20 * seconds(256) / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_chunk": 0}, "max_chunk 0 is out of range: it must be from 1 to 1024"),
        ({"max_chunk": 2000}, "max_chunk 2000 is out of range"),
        ({"headroom": 0.0}, "headroom 0.0 is out of range"),
        ({"max_pause": -1}, "max_pause -1 is negative"),
    ],
)
def test_bad_options_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBudget(LIMITS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("time", [-1.0, inf, float("nan")])
def test_a_time_that_cannot_be_is_refused(time: float) -> None:
    with pytest.raises(ValueError, match="a step cannot take"):
        StepTimes().observe(64, 64, time)


def test_an_answer_has_a_row_in_one_step_of_as_many_as_there_are_groups() -> None:
    grouped_limits = make_limits(num_slots=128, decode_groups=4, chunk_rows=(64, 256, 1024))
    plain, grouped = trained(TokenBudget(LIMITS)), trained(TokenBudget(grouped_limits))
    for tpot in (0.0058, 0.006, 0.0064):
        most = plain.max_decoding(tpot)
        assert 1 < most < 32
        assert grouped.max_decoding(4 * tpot) == 4 * most
    # Four steps of 9 take 22 ms in all: a step with a prompt may take half as long again, not one step of 9.
    assert grouped.budget(33, 0.0205) == 256 - 33
