"""The figures of a run, by the names under which `vllm bench serve` prints and saves them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.bench.traffic import Outcome, Run

Figures = dict[str, Any]
DETAILS = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "latencies",
    "generated_texts",
    "errors",
)
"""Figures that are lists, of a value or more for each request."""
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
_WIDTH = 50
_HEAD = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Maximum request concurrency:", "max_concurrency", "d"),
    ("Request rate configured (RPS):", "request_rate", ".2f"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", ".2f"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
)
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def read_goodput(text: str) -> dict[str, float]:
    """Milliseconds by name, from `ttft:500,tpot:50`. Raises ValueError for what is not like that."""
    limits: dict[str, float] = {}
    for part in text.replace(" ", ",").split(","):
        name, _, value = part.partition(":")
        if name not in GOODPUT_NAMES:
            raise ValueError(f"goodput {part!r}: expected one of {', '.join(GOODPUT_NAMES)}, a colon and ms")
        limits[name] = float(value)
        if not limits[name] >= 0:
            raise ValueError(f"goodput {part!r}: the limit is not a number from 0 up")
    return limits


def summarise(run: Run, goodput: Mapping[str, float] | None = None) -> Figures:
    """All figures of a run; times in seconds in lists, in milliseconds in their statistics.

    goodput: the most milliseconds by name that a good answer takes.
    """
    good = [outcome for outcome in run.outcomes if not outcome.error]
    num_input = sum(outcome.usage.prompt_tokens for outcome in good)
    num_output = sum(outcome.usage.output_tokens for outcome in good)
    num_kept = sum(_keeps(outcome, goodput or {}) for outcome in good)
    figures: Figures = {
        "duration": run.seconds,
        "completed": len(good),
        "failed": len(run.outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / run.seconds,
        "request_goodput": num_kept / run.seconds if goodput else None,
        "output_throughput": num_output / run.seconds,
        "total_token_throughput": (num_input + num_output) / run.seconds,
        "input_lens": [outcome.usage.prompt_tokens for outcome in run.outcomes],
        "output_lens": [outcome.usage.output_tokens for outcome in run.outcomes],
        "ttfts": [outcome.ttft for outcome in run.outcomes],
        "itls": [outcome.itls for outcome in run.outcomes],
        "latencies": [outcome.latency for outcome in run.outcomes],
        "start_times": [outcome.start for outcome in run.outcomes],
        "generated_texts": [outcome.text for outcome in run.outcomes],
        "errors": [outcome.error for outcome in run.outcomes],
        "max_output_tokens_per_s": _peak_rate(good),
        "max_concurrent_requests": _peak_concurrency(good),
    }
    times = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if outcome.tpot is not None],
        "itl": [itl for outcome in good for itl in outcome.itls],
        "e2el": [outcome.latency for outcome in good],
    }
    for name, seconds in times.items():
        figures |= _statistics(name, seconds)
    return figures


def describe_run(**traffic: Any) -> Figures:
    """What was asked for, as vLLM's result files begin."""
    return {"date": time.strftime("%Y%m%d-%H%M%S"), **traffic}


def report(figures: Figures) -> str:
    """The figures as a table; those that are None or infinite are left out."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    for label, key, form in _HEAD:
        value = figures.get(key)
        if value is not None and value not in ("inf", float("inf")):
            lines.append(f"{label:<40} {value:<10{form}}")
    for name, heading in LATENCIES.items():
        lines.append(f"{heading:-^{_WIDTH}}")
        for prefix in ("Mean", "Median", "P99"):
            value = figures[f"{prefix.lower()}_{name}_ms"]
            lines.append(f"{f'{prefix} {name.upper()} (ms):':<40} {value:<10.2f}")
    return "\n".join([*lines, "=" * _WIDTH])


def _keeps(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    # An answer of one token has no time for each further one, and keeps every limit of it.
    taken = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(taken[name] * 1e3 <= limit for name, limit in limits.items())


def _statistics(name: str, seconds: Sequence[float]) -> Figures:
    """Of nothing, all are 0, as vLLM has it."""
    milliseconds = np.asarray(seconds or [0.0]) * 1e3
    return {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
        f"p99_{name}_ms": float(np.percentile(milliseconds, 99)),
    }


def _peak_rate(good: Sequence[Outcome]) -> float:
    """The most pieces within one second of the run's clock."""
    times = [outcome.start + np.cumsum([outcome.ttft, *outcome.itls]) for outcome in good]
    return float(np.bincount(np.concatenate(times).astype(int)).max()) if times else 0.0


def _peak_concurrency(good: Sequence[Outcome]) -> int:
    """The most requests that were open at once; one that ends as another starts is not."""
    changes = sorted(
        [(outcome.start, 1) for outcome in good] + [(outcome.start + outcome.latency, -1) for outcome in good]
    )
    return int(np.cumsum([change for _, change in changes]).max()) if changes else 0
