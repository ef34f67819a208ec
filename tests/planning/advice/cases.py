"""Evidence on which each rule speaks, and the same a little before its threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.planning.advice import RULES, Advice, Divergence, Evidence
from tests.planning.advice.measured import run, seen, traffic

LITTLE = 1e-6
PARTING = Divergence(
    position=20, unit="character", num_prompts=90, before="It is 10:0", first="0:01. You", second="1:07. You"
)
SPEC = "vllm:spec_decode_num_"


def kept_out(hurdle: str, share: float, **further: float) -> dict[str, float]:
    return {f'jaxserve:kept_out_steps_total{{hurdle="{hurdle}"}}': 1000 * share, **further}


def drafted(plain_seconds: float, num_drafts: int = 200) -> dict[str, float]:
    return {
        f"{SPEC}drafts_total": num_drafts,
        f"{SPEC}draft_tokens_total": 3.0 * num_drafts,
        f"{SPEC}accepted_tokens_total": 10,
        "jaxserve:spec_decode_seconds_total": 4.0,
        "jaxserve:spec_decode_plain_seconds_total": plain_seconds,
    }


def compared(technique: Any, **better: float) -> Evidence:
    """A benchmark with a technique, whose figures are so much better than without."""
    plain = run(output_throughput=100.0, median_tpot_ms=20.0, p99_itl_ms=60.0, request_goodput=1.0)
    figures = {
        "output_throughput": 100.0 * better.get("rate", 1.0),
        "median_tpot_ms": 20.0 / better.get("tpot", 1.0),
        "p99_itl_ms": 60.0 / better.get("gaps", 1.0),
        "request_goodput": 1.0 * better.get("goodput", 1.0),
    }
    return seen(runs=(run(**figures),), without={technique: (plain,)})


@dataclass(frozen=True)
class Case:
    """Evidence on which a rule speaks, and the same on which it is quiet."""

    rule: str
    speaks: Callable[[], Evidence]
    quiet: Callable[[], Evidence]


def other_load(technique: Any) -> Evidence:
    return seen(runs=(run(4),), without={technique: (run(8),)})


SUCCESS = 'vllm:request_success_total{finished_reason="stop"}'
TPOT = "vllm:request_time_per_output_token_seconds"
TARGET = 'jaxserve:tpot_target_seconds{class="default"}'
USAGE = "vllm:kv_cache_usage_perc"
CASES = [
    Case(
        "longest-does-not-fit",
        lambda: seen(traffic=traffic(longest=3201)),
        lambda: seen(traffic=traffic(longest=3200)),
    ),
    Case(
        "batch-held-by-pages",
        lambda: seen(kept_out("pages", 0.1)),
        lambda: seen(kept_out("pages", 0.1 - LITTLE)),
    ),
    Case(
        "kv-oversubscribed",
        lambda: seen({"vllm:num_preemptions_total": 8}),
        lambda: seen({"vllm:num_preemptions_total": 7}),
    ),
    Case(
        "kv-oversubscribed",
        lambda: seen({"jaxserve:recomputed_tokens_total": 500}),
        lambda: seen({"jaxserve:recomputed_tokens_total": 499}),
    ),
    Case(
        "prompts-diverge",
        lambda: seen(traffic=traffic(prefix=0.25, repeated=0.45, parting=PARTING)),
        lambda: seen(traffic=traffic(prefix=0.25 + LITTLE, repeated=0.45, parting=PARTING)),
    ),
    Case(
        "prompts-diverge",
        lambda: seen(traffic=traffic(prefix=0.0, repeated=0.5, parting=PARTING)),
        lambda: seen(traffic=traffic(prefix=0.0, repeated=0.5)),
    ),
    Case(
        "prefix-cache-off",
        lambda: seen({"vllm:prefix_cache_queries_total": 0}, traffic=traffic(prefix=0.1)),
        lambda: seen({"vllm:prefix_cache_queries_total": 0}, traffic=traffic(prefix=0.1 - LITTLE)),
    ),
    Case(
        "prefix-cache-off",
        lambda: seen({"vllm:prefix_cache_queries_total": 0}, traffic=traffic()),
        lambda: seen(traffic=traffic()),
    ),
    Case(
        "hits-below-reuse",
        lambda: seen({"vllm:prefix_cache_hits_total": 2000}, traffic=traffic(prefix=0.5)),
        lambda: seen({"vllm:prefix_cache_hits_total": 2001}, traffic=traffic(prefix=0.5)),
    ),
    Case(
        "hits-below-reuse",
        lambda: seen({"vllm:prefix_cache_hits_total": 0}, traffic=traffic(prefix=0.1)),
        lambda: seen({"vllm:prefix_cache_hits_total": 0}, traffic=traffic(prefix=0.1 - LITTLE)),
    ),
    Case(
        "cache-forgets",
        lambda: seen({"jaxserve:prefix_cache_evicted_pages_total": 500}),
        lambda: seen({"jaxserve:prefix_cache_evicted_pages_total": 499}),
    ),
    Case(
        "cache-forgets",
        lambda: seen({"jaxserve:prefix_cache_evicted_pages_total": 900, "vllm:prefix_cache_hits_total": 800}),
        lambda: seen({"jaxserve:prefix_cache_evicted_pages_total": 900, "vllm:prefix_cache_hits_total": 799}),
    ),
    Case(
        "slots-full",
        lambda: seen(kept_out("slots", 0.1)),
        lambda: seen(kept_out("slots", 0.1 - LITTLE)),
    ),
    Case(
        "slots-full",
        lambda: seen(kept_out("slots", 0.9) | {USAGE: 0.8}),
        lambda: seen(kept_out("slots", 0.9) | {USAGE: 0.8 + LITTLE}),
    ),
    Case(
        "slots-full",
        lambda: seen(kept_out("slots", 0.9), tpot_ms=25.0),
        lambda: seen(kept_out("slots", 0.9), tpot_ms=25.0 - LITTLE),
    ),
    Case(
        "batch-held-by-rows",
        lambda: seen(kept_out("rows", 0.1)),
        lambda: seen(kept_out("rows", 0.1 - LITTLE)),
    ),
    Case(
        "batch-held-by-target",
        lambda: seen(kept_out("tpot_target", 0.1)),
        lambda: seen(kept_out("tpot_target", 0.1 - LITTLE)),
    ),
    Case(
        "batch-past-limit",
        lambda: seen(tpot_ms=25.0 - 1e-3),
        lambda: seen(tpot_ms=25.0),
    ),
    Case(
        "batch-past-limit",
        lambda: seen({"vllm:generation_tokens_total": 2000}, tpot_ms=20.0),
        lambda: seen({"vllm:generation_tokens_total": 1999}, tpot_ms=20.0),
    ),
    Case(
        "load-past-limit",
        lambda: seen(runs=(run(1), run(4)), tpot_ms=30.0 - LITTLE),
        lambda: seen(runs=(run(1), run(4)), tpot_ms=30.0),
    ),
    Case(
        "load-past-limit",
        lambda: seen(runs=(run(2),), tpot_ms=29.0),
        lambda: seen(runs=(run(1),), tpot_ms=29.0),
    ),
    Case(
        "one-answer-too-slow",
        lambda: seen({"vllm:generation_tokens_total": 1999}, tpot_ms=25.0 - 1e-3),
        lambda: seen({"vllm:generation_tokens_total": 1999}, tpot_ms=25.0),
    ),
    Case(
        "one-answer-too-slow",
        lambda: seen({"vllm:generation_tokens_total": 1000}, tpot_ms=20.0),
        lambda: seen({"vllm:generation_tokens_total": 1000} | drafted(9.0), tpot_ms=20.0, precision="int8@2"),
    ),
    Case("drafts-cost-time", lambda: seen(drafted(4.0)), lambda: seen(drafted(4.0 + LITTLE))),
    Case("drafts-cost-time", lambda: seen(drafted(1.0)), seen),
    Case(
        "prompts-stall-answers",  # Steps that only decode take 20 ms in the mean.
        lambda: seen({TPOT: 0.030}),
        lambda: seen({TPOT: 0.030 - LITTLE}),
    ),
    Case(
        "prompts-stall-despite-target",
        lambda: seen({TPOT: 0.028 + LITTLE, TARGET: 0.028}),
        lambda: seen({TPOT: 0.028 - LITTLE, TARGET: 0.028}),
    ),
    Case(
        "prompts-stall-despite-target",
        lambda: seen({TPOT: 0.1, TARGET: 0.020}),
        lambda: seen({TPOT: 0.1, TARGET: 0.020 - LITTLE}),
    ),
    Case(
        "long-gaps",
        lambda: seen(runs=(run(p99_itl_ms=100.0),)),
        lambda: seen(runs=(run(p99_itl_ms=100.0 - LITTLE),)),
    ),
    *(
        Case(
            f"{technique}-without-gain",
            lambda technique=technique, measure=measure: compared(technique, **{measure: 1.05 - LITTLE}),
            lambda technique=technique, measure=measure: compared(technique, **{measure: 1.05 + LITTLE}),
        )
        for technique in ("speculation", "quantization")
        for measure in ("rate", "tpot")
    ),
    *(
        Case(
            "disaggregation-worse",
            lambda measure=measure: compared("disaggregation", **{measure: 0.8}),
            lambda measure=measure: compared("disaggregation", **{measure: 1.05 + LITTLE}),
        )
        for measure in ("rate", "gaps", "goodput")
    ),
]
BY_NAME = {rule.name: rule for rule in RULES}


def judged(name: str, evidence: Evidence) -> Advice:
    found = BY_NAME[name].judge(evidence)
    assert found is not None
    return found
