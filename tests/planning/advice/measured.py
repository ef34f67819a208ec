"""Measurements as a server, a benchmark or a recording would have them, for tests to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.planning.advice import (
    BenchmarkRun,
    Divergence,
    Evidence,
    Limits,
    Repeats,
    ServerWindow,
    Technique,
    Traffic,
    open_window,
    parse_page,
    parse_runs,
)

INFO = 'fingerprint="f",precision="{precision}",kv_format="{kv_format}",device="{device}",version="1"'
POOL = 'block_size="16",num_gpu_blocks="{num_pages}",cache_dtype="bfloat16"'
HURDLES = ("slots", "pages", "tpot_target", "rows")

GOOD_DAY: Mapping[str, float] = {
    "jaxserve:num_slots": 8,
    "vllm:num_requests_running": 4,
    "vllm:num_requests_waiting": 0,
    "vllm:kv_cache_usage_perc": 0.5,
    "jaxserve:steps_total": 1000,
    "vllm:generation_tokens_total": 4000,
    "vllm:iteration_tokens_total_sum": 10000,
    'vllm:request_success_total{finished_reason="stop"}': 80,
    'vllm:request_success_total{finished_reason="length"}': 0,
    "vllm:prefix_cache_queries_total": 8000,
    "vllm:prefix_cache_hits_total": 2400,
    "jaxserve:prefix_cache_stored_pages_total": 1000,
    "jaxserve:prefix_cache_evicted_pages_total": 100,
    "vllm:num_preemptions_total": 1,
    "jaxserve:recomputed_tokens_total": 100,
    "vllm:spec_decode_num_drafts_total": 0,
    "vllm:spec_decode_num_draft_tokens_total": 0,
    "vllm:spec_decode_num_accepted_tokens_total": 0,
    "jaxserve:spec_decode_seconds_total": 0,
    "jaxserve:spec_decode_plain_seconds_total": 0,
    'jaxserve:decode_steps_total{rows="2"}': 300,
    'jaxserve:decode_step_seconds_total{rows="2"}': 3.0,
    'jaxserve:decode_steps_total{rows="8"}': 300,
    'jaxserve:decode_step_seconds_total{rows="8"}': 9.0,
    'jaxserve:request_tokens_total{tenant="none",kind="prompt"}': 8000,
    'jaxserve:class_time_to_first_token_seconds_count{class="default"}': 80,
    'jaxserve:class_time_to_first_token_seconds_count{class="interactive"}': 0,
    **{f'jaxserve:kept_out_steps_total{{hurdle="{hurdle}"}}': 0 for hurdle in HURDLES},
}
"""Counters and gauges of a server that has nothing to complain of: four answers a step, in eight slots."""
TIMES: Mapping[str, float] = {
    "vllm:request_time_per_output_token_seconds": 0.025,
    "vllm:time_to_first_token_seconds": 0.1,
    "vllm:request_prompt_tokens": 100,
    "vllm:request_generation_tokens": 50,
    "vllm:request_prefill_kv_computed_tokens": 70,
}
"""What its histograms have of each of the 80 answers."""


def page_text(
    changes: Mapping[str, float] | None = None,
    *,
    model: str = "fake",
    num_answers: int = 80,
    num_pages: int = 200,
    precision: str = "float32",
    kv_format: str = "bfloat16",
    device: str = "cpu",
    lacking: tuple[str, ...] = (),
) -> str:
    """A good day's page with changes, of counters by name and labels and of histograms by name; `lacking`
    those whose names begin like that."""
    changed = dict(changes or {})
    info = INFO.format(precision=precision, kv_format=kv_format, device=device)
    values = {
        f"jaxserve:model_info{{{info}}}": 1.0,
        f"vllm:cache_config_info{{{POOL.format(num_pages=num_pages)}}}": 1.0,
        **GOOD_DAY,
        **{name: value for name, value in changed.items() if name not in TIMES},
    }
    for name, value in (TIMES | {name: changed[name] for name in TIMES if name in changed}).items():
        # All in a bucket so narrow that any share of them is the value.
        buckets = {value * (1 - 1e-9): 0, value: num_answers, "+Inf": num_answers}
        values |= {f'{name}_bucket{{le="{bound}"}}': count for bound, count in buckets.items()}
        values[f"{name}_sum"] = num_answers * value
    lines = [_line(name, value, model) for name, value in values.items() if not name.startswith(lacking)]
    return "# TYPE jaxserve:num_slots gauge\n" + "\n".join(lines) + "\n"


def _line(name: str, value: float, model: str) -> str:
    metric, _, labels = name.rstrip("}").partition("{")
    labels = f'model_name="{model}"' + ("," + labels if labels else "")
    return f"{metric}{{{labels}}} {float(value)!r}"


def server(changes: Mapping[str, float] | None = None, **known: Any) -> ServerWindow:
    """The server of such a page, since its start."""
    return ServerWindow(open_window([parse_page("page", page_text(changes, **known))], None))


def traffic(
    *,
    prefix: float = 0.3,
    repeated: float = 0.3,
    longest: int | None = 200,
    parting: Divergence | None = None,
) -> Traffic:
    """Recorded requests that have so much in common."""
    return Traffic(
        name="log",
        num_requests=100,
        repeats=Repeats(prefix_share=prefix, repeated_share=repeated, divergence=parting),
        longest=longest,
    )


def run(num_open: int = 4, **figures: Any) -> BenchmarkRun:
    """A benchmark with so many requests open at once."""
    record = {
        "request_rate": "inf",
        "max_concurrency": num_open,
        "num_prompts": 24,
        "total_input_tokens": 1536,
        "completed": 24,
        "max_concurrent_requests": num_open,
        "output_throughput": 100.0,
        "request_goodput": None,
        "median_tpot_ms": 20.0,
        "p99_tpot_ms": 30.0,
        "p99_ttft_ms": 200.0,
        "median_itl_ms": 20.0,
        "p99_itl_ms": 60.0,
    }
    (found,) = parse_runs("bench.json", record | figures)
    return found


def seen(
    changes: Mapping[str, float] | None = None,
    *,
    tpot_ms: float | None = None,
    traffic: Traffic | None = None,
    runs: tuple[BenchmarkRun, ...] = (),
    without: Mapping[Technique, tuple[BenchmarkRun, ...]] | None = None,
    **known: Any,
) -> Evidence:
    """A good day's server with changes, and what else is known."""
    return Evidence(
        limits=Limits(tpot=None if tpot_ms is None else tpot_ms / 1e3),
        known_server=server(changes, **known),
        known_traffic=traffic,
        known_runs=runs,
        runs_without=without or {},
    )
