"""Results of `python -m benchmarks.serving --json`, whose keys are those of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_COMPARED = ("request_rate", "burstiness", "max_concurrency", "num_prompts", "total_input_tokens")
"""What is equal in two runs of one load."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkRun:
    """One load, as it was served. Times in seconds."""

    name: str
    """Of the file."""
    load: Mapping[str, Any]
    """What was asked for."""
    concurrency: int
    """Requests that were open at once, at most."""
    output_rate: float
    """Tokens a second."""
    goodput: float | None
    """Requests a second that kept the limits which the benchmark was given; None where there were none."""
    tpot_p50: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float

    @property
    def label(self) -> str:
        """How to call it among others."""
        rate = self.load["request_rate"]
        return f"{self.concurrency} at once" if rate == "inf" else f"{rate:g} requests/s"


def parse_runs(name: str, content: Any) -> list[BenchmarkRun]:
    """The runs of a result, or of a sweep. Raises ValueError, naming file and key, for another content, and
    for runs in which nothing was answered."""
    records = content if isinstance(content, list) else [content]
    if not records:
        raise ValueError(f"{name} is an empty list: expected benchmark results")
    return [_run(name, record) for record in records]


def _run(name: str, record: Any) -> BenchmarkRun:
    if not isinstance(record, Mapping):
        raise ValueError(f"{name}: {type(record).__name__} instead of a benchmark result")
    if not _number(name, record, "completed"):
        raise ValueError(f"{name}: no request of the benchmark was answered")
    rate = record.get("request_rate", "inf")
    goodput = record.get("request_goodput")
    return BenchmarkRun(
        name=name,
        load={key: record.get(key) for key in _COMPARED} | {"request_rate": rate},
        concurrency=int(_number(name, record, "max_concurrent_requests")),
        output_rate=_number(name, record, "output_throughput"),
        goodput=None if goodput is None else _number(name, record, "request_goodput"),
        tpot_p50=_number(name, record, "median_tpot_ms") / 1e3,
        tpot_p99=_number(name, record, "p99_tpot_ms") / 1e3,
        itl_p50=_number(name, record, "median_itl_ms") / 1e3,
        itl_p99=_number(name, record, "p99_itl_ms") / 1e3,
    )


def _number(name: str, record: Mapping[str, Any], key: str) -> float:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: {key} {value!r} is not a number, as a benchmark result has it")
    return float(value)


def same_load(
    runs: Sequence[BenchmarkRun], others: Sequence[BenchmarkRun]
) -> Iterator[tuple[BenchmarkRun, BenchmarkRun]]:
    """Pairs of runs that were asked the same."""
    for run in runs:
        for other in others:
            if run.load == other.load:
                yield run, other
                break
