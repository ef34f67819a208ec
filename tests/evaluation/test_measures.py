"""Floors: how they are written, what they hold to, what a report says of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jaxserve.evaluation import MEASURES, EvaluationReport, Floor
from jaxserve.evaluation.measures import Measure, SliceReport, Verdict, judge_floors, text_slice
from jaxserve.evaluation.report import NeedleCell, SideReport
from jaxserve.evaluation.scoring import TokenScores

SIDE = SideReport(
    name="m",
    compute_format="float32",
    kv_format="int8",
    precision="float32",
    options={"kv_format": "int8", "num_slots": 3},
    weight_bytes=2**20,
    kv_bytes_per_token=64.0,
    scored_tokens_per_second=10.0,
)
SLICES = [
    SliceReport("text/a", 10, "tokens", {"kl": Measure(0.02), "top1": Measure(0.9)}),
    SliceReport("text/b", 10, "tokens", {"kl": Measure(0.005), "top1": Measure(math.nan)}),
]


def test_floors_are_read() -> None:
    assert Floor.parse("kl=0.02") == Floor("kl", 0.02)
    assert Floor.parse("text/a:kl-p99=1e-3") == Floor("kl-p99", 0.001, "text/a")
    assert str(Floor.parse("text/a:kl=0.5")) == "text/a:kl=0.5"


@pytest.mark.parametrize("text", ["kl", "kl:0.5", "speed=3", "kl=", "kl=low", "kl=nan", "=1", ""])
def test_what_is_no_floor_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="floor"):
        Floor.parse(text)


def test_a_floor_holds_in_every_slice_or_in_one() -> None:
    verdicts = judge_floors([Floor("kl", 0.01), Floor("kl", 0.03, "text/a")], SLICES)
    assert [(verdict.slice, verdict.passed) for verdict in verdicts] == [
        ("text/a", False),
        ("text/b", True),
        ("text/a", True),
    ]
    assert verdicts[0].missed_by == pytest.approx(0.01)
    assert str(verdicts[0]) == "kl of text/a is 0.02, at most 0.01 asked: missed by 0.01"
    assert verdicts[1].missed_by == 0


def test_shares_have_to_be_as_high_as_their_floor_and_numbers() -> None:
    verdicts = judge_floors([Floor("top1", 0.95)], SLICES)
    assert [verdict.passed for verdict in verdicts] == [False, False]
    assert Verdict(Floor("top1", 0.9), "s", 0.9).passed
    assert Verdict(Floor("kl", 0.9), "s", 0.9).passed
    assert not Verdict(Floor("kl", 0.9), "s", math.nan).passed


@pytest.mark.parametrize("floor", [Floor("exact", 0.5), Floor("kl", 0.5, "text/c")])
def test_a_floor_that_nothing_measures_is_refused(floor: Floor) -> None:
    with pytest.raises(ValueError, match=r"nothing measures that; measured are text/a:kl"):
        judge_floors([floor], SLICES)


def test_the_figures_of_a_text() -> None:
    nll = np.log(np.array([2.0, 8.0], np.float32))
    kl = np.linspace(0, 1, 101).astype(np.float32)
    report = text_slice("t", TokenScores(nll, nll[::-1] / 2, kl, kl > 0.5))
    assert report.measures["perplexity"].model == pytest.approx(4.0)
    assert report.measures["perplexity"].reference == pytest.approx(2.0)
    assert report.measures["perplexity"].value == pytest.approx(2.0)
    assert report.measures["perplexity-change"].value == pytest.approx(1.0)
    assert report.measures["kl"].value == pytest.approx(0.5)
    assert report.measures["kl-p99"].value == pytest.approx(0.99)
    assert report.measures["top1"].value == pytest.approx(50 / 101)
    assert {*report.measures} <= {*MEASURES}


def test_a_report_is_a_table_and_json_even_of_no_numbers() -> None:
    report = EvaluationReport(
        model=SIDE,
        reference=SIDE,
        slices=SLICES,
        verdicts=judge_floors([Floor("kl", 0.01)], SLICES),
        needle_grid=[NeedleCell(100, 0.0, True, False), NeedleCell(100, 1.0, False, True)],
        not_judged={"x:y": 2},
    )
    table = report.table()
    assert (
        "m: float32, KV int8, num_slots 3; weights 1.0 MiB, KV 64 bytes a token, 10.0 tokens/s scored"
        in table
    )
    assert "0.01 MISSED" in table
    assert "0.01 ok" in table
    assert "    100     M-     -R" in table
    assert "not judged: x:y (2)" in table
    assert table.endswith("FAILED: 1 of 2 floors hold")
    fields = json.loads(report.to_json())
    assert fields["passed"] is False
    assert fields["slices"][1]["measures"]["top1"]["value"] is None
    assert [verdict["passed"] for verdict in fields["verdicts"]] == [False, True]
    assert fields["verdicts"][0]["floor"] == "kl=0.01"
    assert fields["model"]["weight_bytes"] == 2**20
