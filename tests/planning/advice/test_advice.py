"""What advice says: the numbers, the setting that follows from them, and names that exist."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from jaxserve.planning.advice import A_SIZE, Advice, Setting, advise
from jaxserve.scheduling import SchedulerPolicy
from tests.planning.advice.cases import BY_NAME, CASES, PARTING, USAGE, judged, kept_out
from tests.planning.advice.measured import run, seen, traffic


def test_the_place_where_prompts_part_is_shown() -> None:
    advice = judged("prompts-diverge", seen(traffic=traffic(prefix=0.0, repeated=0.5, parting=PARTING)))
    assert "90 prompts part from others at character 20, where a date or a time stands" in advice.evidence[-1]
    assert "'It is 10:0' come '0:01. You' and '1:07. You'" in advice.evidence[-1]
    assert "the server found 30%" in advice.evidence[1]


def test_a_small_hit_rate_is_put_down_to_tenants_or_to_forgetting() -> None:
    tenants = {
        f'jaxserve:request_tokens_total{{tenant="{name}",kind="prompt"}}': 100.0 for name in ("red", "blue")
    }
    missed = {"vllm:prefix_cache_hits_total": 0.0}
    shared = traffic(prefix=0.6)
    (setting,) = judged("hits-below-reuse", seen(missed | tenants, traffic=shared)).settings
    assert setting.name == "cache_salt"
    (setting,) = judged("hits-below-reuse", seen(missed, traffic=shared)).settings
    assert setting.name == "--host-kv-memory"
    forgetting = missed | tenants | {"jaxserve:prefix_cache_evicted_pages_total": 500.0}
    (setting,) = judged("hits-below-reuse", seen(forgetting, traffic=shared)).settings
    assert setting.name == "--host-kv-memory"


@pytest.mark.parametrize(("usage", "num_slots"), [(0.2, "16"), (0.5, "16"), (0.8, "10")])
def test_no_more_slots_are_advised_than_have_pages(usage: float, num_slots: str) -> None:
    advice = judged("slots-full", seen(kept_out("slots", 0.5) | {USAGE: usage}))
    assert advice.settings == (Setting("option", "--num-slots", num_slots),)


def test_the_largest_batch_within_the_limit_is_what_was_measured() -> None:
    advice = judged("batch-past-limit", seen(tpot_ms=15.0))
    assert advice.settings == (
        Setting("policy", "classes.default.tpot_target", pytest.approx(0.015)),
        Setting("option", "--num-slots", "2"),
    )
    assert "2 answers are the most within it: 10.0 ms" in advice.evidence[-1]
    none = judged("batch-past-limit", seen(tpot_ms=9.0))
    assert none.settings[1].value == "1"
    assert "the smallest step that only decodes takes 10.0 ms" in none.evidence[-1]


def test_a_class_that_is_served_brings_its_own_limit() -> None:
    target = 'jaxserve:tpot_target_seconds{class="default"}'
    assert judged("batch-past-limit", seen({target: 0.015})).settings[0].value == 0.015
    assert BY_NAME["batch-past-limit"].judge(seen({target: 0.015}, tpot_ms=30.0)) is None, (
        "what is asked for counts"
    )
    other = 'jaxserve:tpot_target_seconds{class="interactive"}'
    assert "batch-past-limit" in advise(seen({other: 0.015})).not_judged


def test_of_a_sweep_the_largest_load_within_the_limit_is_advised() -> None:
    sweep = tuple(run(n, p99_tpot_ms=10.0 * n, output_throughput=20.0 * n) for n in (8, 1, 4, 2))
    advice = judged("load-past-limit", seen(runs=sweep, tpot_ms=45.0))
    assert advice.settings[0] == Setting("option", "--num-slots", "4")
    assert "80.0 tokens a second in all instead of 160.0" in advice.trade_off
    nothing = judged("load-past-limit", seen(runs=sweep[:1], tpot_ms=45.0))
    assert "none of the 1 loads that were tried kept it" in nothing.evidence[1]


def test_a_slow_single_answer_is_offered_what_is_not_in_force() -> None:
    alone = {"vllm:generation_tokens_total": 1000.0}
    options = [setting.name for setting in judged("one-answer-too-slow", seen(alone, tpot_ms=20.0)).settings]
    assert options == ["--quantize", "--speculative"]
    (setting,) = judged("one-answer-too-slow", seen(alone, tpot_ms=20.0, precision="int8@2 float32")).settings
    assert setting.name == "--speculative"


def test_a_wide_pool_is_made_narrow_before_it_is_made_larger() -> None:
    held = kept_out("pages", 0.5)
    assert judged("batch-held-by-pages", seen(held)).settings[0] == Setting("option", "--kv-format", "int8")
    narrow = judged("batch-held-by-pages", seen(held, kv_format="int8"))
    assert narrow.settings[0] == Setting("option", "--kv-memory", A_SIZE)


def test_slots_are_cut_to_the_sequences_that_fit() -> None:
    preempted = {"vllm:num_preemptions_total": 40.0}
    few = judged("kv-oversubscribed", seen(preempted, num_pages=45)).settings
    assert few == (Setting("policy", "pages_ahead", 1.0), Setting("option", "--num-slots", "6"))
    assert judged("kv-oversubscribed", seen(preempted)).settings == few[:1]


def test_on_a_cpu_the_recipe_that_is_quick_there_is_named() -> None:
    def setting(**known: str) -> Setting:
        slow = {"quantization": (run(),)}
        return judged("quantization-without-gain", seen(runs=(run(),), without=slow, **known)).settings[0]

    assert setting(precision="int4@1 float32") == Setting("option", "--quantize", "int8")
    assert setting(precision="int8@2 float32") == Setting("option", "--quantize")
    assert setting(precision="int4@1 float32", device="tpu") == Setting("option", "--quantize")


def test_a_gain_is_judged_over_all_loads_that_both_served() -> None:
    plain = (run(1), run(4), run(16))
    drafted_runs = (
        run(1, median_tpot_ms=10.0),
        run(4, median_tpot_ms=10.0),
        run(16, median_tpot_ms=40.0),
        run(64),
    )
    assert (
        BY_NAME["speculation-without-gain"].judge(seen(runs=drafted_runs, without={"speculation": plain}))
        is None
    )
    slower = (run(1, median_tpot_ms=10.0), *(run(n, median_tpot_ms=40.0) for n in (4, 16)))
    advice = judged("speculation-without-gain", seen(runs=slower, without={"speculation": plain}))
    assert "time per token: 2.00, 0.50, 0.50 times as good" in advice.evidence[1]
    assert advice.evidence[-1] == "loads: 1 at once, 4 at once, 16 at once"


# What it names exists --------------------------------------------------------------------------------------


def all_advice() -> list[Advice]:
    return [judged(case.rule, case.speaks()) for case in CASES]


def further_advice() -> list[Advice]:
    """Branches that the cases above do not take."""
    shared = traffic(prefix=0.6)
    tenants = {f'jaxserve:request_tokens_total{{tenant="{n}",kind="prompt"}}': 1.0 for n in "ab"}
    return [
        judged("hits-below-reuse", seen({"vllm:prefix_cache_hits_total": 0.0, **tenants}, traffic=shared)),
        judged("batch-held-by-pages", seen(kept_out("pages", 0.5), kv_format="int8")),
        judged("kv-oversubscribed", seen({"vllm:num_preemptions_total": 40.0}, num_pages=45)),
    ]


def test_every_metric_to_watch_is_one_of_the_server() -> None:
    pytest.importorskip("grpc")
    table = pytest.importorskip("server.core.telemetry.table")
    known = set(re.findall(r"^\| `([^`]+)`", table.page(), re.MULTILINE))
    for advice in all_advice() + further_advice():
        assert advice.watch
        assert set(advice.watch) <= known


def test_every_setting_is_one_that_there_is() -> None:
    command = pytest.importorskip("server.command")
    parser = argparse.ArgumentParser()
    command.SERVE.add_arguments(parser)
    metavars = {option: action.metavar for action in parser._actions for option in action.option_strings}
    settings = {one for advice in all_advice() + further_advice() for one in advice.settings}
    assert {one.place for one in settings} == {"option", "policy", "request"}
    for setting in settings:
        if setting.place == "option":
            assert setting.name in metavars
            if setting.value == A_SIZE:
                assert metavars[setting.name] == A_SIZE
            elif setting.value is not None:
                assert parser.parse_args(["m", setting.name, str(setting.value)])
        elif setting.place == "policy":
            assert SchedulerPolicy.from_mapping(nested(setting.name, setting.value)) != SchedulerPolicy()
        else:
            assert setting.name in {"messages", "cache_salt"}


def test_a_salt_names_the_namespace_that_tenants_share() -> None:
    terms = pytest.importorskip("server.http.terms")
    found, rest = terms.split_terms({"cache_salt": "everybody", "messages": []}, {})
    assert found.cache_namespace == "everybody"
    assert rest == {"messages": []}


def nested(name: str, value: Any) -> dict[str, Any]:
    head, _, rest = name.partition(".")
    return {head: nested(rest, value) if rest else value}
