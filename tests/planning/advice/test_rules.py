"""Each rule in both directions: it speaks at its threshold, and is quiet a little before it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("prometheus_client")

from jaxserve.planning.advice import RULES, Evidence, NotMeasured, Rule, advise
from tests.planning.advice.cases import BY_NAME, CASES, SUCCESS, Case, drafted, judged, kept_out, other_load
from tests.planning.advice.measured import run, seen, traffic


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_speaks_at_its_threshold_and_not_before(case: Case) -> None:
    advice = judged(case.rule, case.speaks())
    assert advice.evidence
    assert all(re.search(r"\d", sentence) for sentence in advice.evidence), "evidence has numbers"
    assert BY_NAME[case.rule].judge(case.quiet()) is None


def test_every_rule_is_tested_and_has_a_name_of_its_own() -> None:
    assert {case.rule for case in CASES} == set(BY_NAME)
    assert len(BY_NAME) == len(RULES)


def test_on_a_good_day_nothing_is_said() -> None:
    same = (run(), run(16))
    better = (run(output_throughput=90.0), run(16, output_throughput=80.0))
    evidence = seen(
        tpot_ms=40.0,
        traffic=traffic(),
        runs=same,
        without={"speculation": better, "quantization": better, "disaggregation": better},
    )
    report = advise(evidence)
    assert (dict(report.advice), dict(report.not_judged)) == ({}, {})
    assert set(report.quiet) == set(BY_NAME)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_without_any_measurement_a_rule_says_what_it_takes(rule: Rule) -> None:
    with pytest.raises(NotMeasured, match=r"metrics|trace|benchmark|limit"):
        rule.judge(Evidence())


@pytest.mark.parametrize(
    ("rule", "evidence", "needed"),
    [
        ("slots-full", lambda: Evidence(known_traffic=traffic()), "a server's metrics"),
        ("prompts-diverge", seen, "a trace, or JSON lines of prompts"),
        (
            "prompts-diverge",
            lambda: seen(traffic=replace(traffic(), repeats=None)),
            "a trace with prefix hashes",
        ),
        (
            "longest-does-not-fit",
            lambda: seen(traffic=traffic(longest=None)),
            "lengths of prompts and answers",
        ),
        ("batch-past-limit", seen, "--tpot-limit"),
        ("quantization-without-gain", lambda: seen(runs=(run(),)), "--without quantization=FILE"),
        ("speculation-without-gain", lambda: other_load("speculation"), "a benchmark of the same load"),
        ("drafts-cost-time", lambda: seen(drafted(1.0, num_drafts=49)), "50 drafts or more; there were 49"),
        ("slots-full", lambda: seen({"jaxserve:steps_total": 99}), "100 steps or more; there were 99"),
        ("kv-oversubscribed", lambda: seen({SUCCESS: 9}), "10 answers or more; there were 9"),
        (
            "slots-full",
            lambda: seen(lacking=("jaxserve:kept_out",)),
            "the metric jaxserve:kept_out_steps_total",
        ),
        (
            "prompts-stall-answers",
            lambda: seen(lacking=("jaxserve:decode_s",)),
            "jaxserve:decode_steps_total",
        ),
    ],
)
def test_what_is_missing_is_named(rule: str, evidence: Callable[[], Evidence], needed: str) -> None:
    assert needed in advise(evidence()).not_judged[rule]


def test_enough_is_enough() -> None:
    for name, changes in (
        ("drafts-cost-time", drafted(1.0, num_drafts=50)),
        ("slots-full", {"jaxserve:steps_total": 100, **kept_out("slots", 0.01)}),
        ("kv-oversubscribed", {SUCCESS: 10}),
    ):
        assert name in advise(seen(changes)).advice
