"""Which of two results is better where, and when that cannot be said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.bench.compare import Verdict, compare, comparison_table
from jaxserve.bench.config import Quality
from jaxserve.bench.quality import Evaluation, check_evaluation, check_reference
from jaxserve.bench.result import Check, Result
from jaxserve.bench.summary import table
from jaxserve.machine import Machine
from tests.bench.results import CELLS, result

STEADY = (1.0, 1.01, 0.99)
TWICE_AS_FAST = (0.5, 0.51, 0.49)
SLOW_IS_NOISY = (1.0, 2.1, 0.6)
LIMITS = {"ttft": 1.0, "tpot": 0.1}


def verdicts(a: Result, b: Result, **limits: float) -> list[Verdict]:
    return [cell.verdict for cell in compare(a, b, **LIMITS | limits).cells]


def test_the_better_one_is_found_in_both_directions() -> None:
    a, b = result([STEADY, TWICE_AS_FAST]), result([TWICE_AS_FAST, STEADY])
    assert verdicts(a, b) == [Verdict.B, Verdict.A]
    assert verdicts(b, a) == [Verdict.A, Verdict.B]
    comparison = compare(a, b, **LIMITS)
    assert comparison.cells[0].ratio == pytest.approx(2.0, rel=0.01)
    text = comparison_table(comparison)
    assert f"of 2 cells: 1 {Verdict.A.value}, 1 {Verdict.B.value}" in text
    assert all(name in text for name in CELLS)


def test_noise_is_no_win() -> None:
    a, b = result([SLOW_IS_NOISY, STEADY]), result([(0.9, 1.9, 0.5), STEADY])
    assert b.cells[0].runs[0].goodput(**LIMITS) > a.cells[0].runs[0].goodput(**LIMITS)
    assert verdicts(a, b) == [Verdict.EVEN] * 2
    assert "3 repeats tell little from noise" in comparison_table(compare(a, b, **LIMITS))
    often = result([(0.9, 1.9, 0.5, 1.1, 1.3)] * 2)
    assert "tell little" not in comparison_table(compare(often, often, **LIMITS))


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=5))
def test_a_result_is_no_better_than_itself(seconds: list[float]) -> None:
    one = result([seconds, seconds])
    assert set(verdicts(one, one)) == {Verdict.EVEN}


def test_limits_decide_what_is_good() -> None:
    """Half the rate within the limits beats all of it beyond them."""
    quick, fast = result([STEADY] * 2, ttft=0.2), result([TWICE_AS_FAST] * 2, ttft=2.0)
    assert verdicts(quick, fast) == [Verdict.A] * 2
    assert verdicts(quick, fast, ttft=3.0) == [Verdict.B] * 2
    assert verdicts(quick, fast, ttft=0.1) == [Verdict.NEITHER] * 2
    slow_tokens = result([TWICE_AS_FAST] * 2, tpot=0.2)
    assert verdicts(quick, slow_tokens) == [Verdict.A] * 2
    assert verdicts(quick, slow_tokens, tpot=0.3) == [Verdict.B] * 2


def test_one_repeat_has_no_spread() -> None:
    assert verdicts(result([[1.0], [1.0]]), result([[0.1], [0.1]])) == [Verdict.UNTOLD] * 2


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"config_digest": "other"}, "the configurations differ"),
        (
            {"machine": Machine(processor="loom", cores=2, system="Linux x86_64")},
            "the machines differ .abacus",
        ),
    ],
)
def test_what_is_not_comparable_is_refused_unless_told(fields: dict[str, Any], complaint: str) -> None:
    a, b = result([STEADY] * 2), result([TWICE_AS_FAST] * 2, **fields)
    for one, other in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=complaint.split(" .", maxsplit=1)[0]):
            compare(one, other, **LIMITS)
    with pytest.raises(ValueError, match=complaint):
        compare(a, b, **LIMITS)
    told = compare(a, b, **LIMITS, anyway=True)
    assert [cell.verdict for cell in told.cells] == [Verdict.B] * 2
    assert told.differences


def test_a_missing_cell_is_said_and_none_in_common_is_refused() -> None:
    a, b = result([STEADY] * 2), result([STEADY, []])
    assert compare(a, b, **LIMITS).only_one == [CELLS[1]]
    with pytest.raises(ValueError, match="no cell in common"):
        compare(result([STEADY, []]), result([[], STEADY]), **LIMITS)
    with pytest.raises(ValueError, match="both must be above 0"):
        compare(a, a, ttft=0.0, tpot=1.0)


def test_other_precisions_and_answers_are_said() -> None:
    a, b = result([STEADY] * 2), result([STEADY] * 2, text="other")
    served = replace(b.served, precision="int8@2 float32")
    b = replace(b, served=served, checks=(Check("alone", False, "1 of 2"),))
    comparison = compare(a, b, **LIMITS)
    assert comparison.alike == (0, 24)
    assert comparison.differences == ["precision: float32; int8@2 float32"]
    assert "B did not pass its checks of quality" in comparison_table(comparison)
    assert compare(a, a, **LIMITS).alike == (24, 24)


def test_a_reference_is_held_against_greedy_answers() -> None:
    a, b = result([STEADY] * 2), result([STEADY] * 2, text="other")
    assert check_reference(a.cells, a, Quality()).passed
    assert not check_reference(a.cells, b, Quality()).passed
    assert check_reference(a.cells, b, Quality(reference_identical=0.0)).passed
    assert not check_reference(result([[], []]).cells, a, Quality()).passed, "nothing proves nothing"


def test_an_evaluation_counts_for_its_own_precision_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    served = result([STEADY] * 2).served
    report = '{"model": {"precision": "%s", "kv_format": "float32"}, "passed": %s, "verdicts": [{}]}'
    for precision, passed, expected in (
        ("float32", "true", True),
        ("float32", "false", False),
        ("bfloat16", "true", False),
    ):
        path.write_text(report % (precision, passed))
        assert check_evaluation(Evaluation.read(path), served).passed is expected
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a report of `jaxserve evaluate --json`"):
        Evaluation.read(path)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    one = result([STEADY, TWICE_AS_FAST])
    path.write_text(one.to_json())
    assert Result.read(path).to_json() == one.to_json()
    assert table(Result.read(path), **LIMITS) == table(one, **LIMITS)
    for text in ("[]", "{}", "no JSON", one.to_json().replace('"format": 1', '"format": 99')):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"result\.json: not a result of"):
            Result.read(path)
