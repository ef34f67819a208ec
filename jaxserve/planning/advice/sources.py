"""Where evidence comes from: addresses and files, told apart by what they hold."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from jaxserve.planning.advice.benchmark_results import BenchmarkRun, parse_runs
from jaxserve.planning.advice.evidence import Evidence, Limits, Technique
from jaxserve.planning.advice.metrics_page import MetricsPage, open_window, parse_page
from jaxserve.planning.advice.server_window import ServerWindow
from jaxserve.planning.advice.traffic import Traffic, prompt_traffic, read_prompts, trace_traffic
from jaxserve.planning.trace_files import read_trace

_TIMEOUT_SECONDS = 10.0
_LARGEST_PAGE = 16 * 2**20
"""Bytes of a metrics page, which are some tens of thousands with us."""
_METRICS_PATH = "/metrics"


def gather(
    sources: Sequence[str],
    *,
    limits: Limits,
    without: Mapping[Technique, Path] | None = None,
    model: str | None = None,
    seconds: float = 0.0,
    sleep: Callable[[float], object] = time.sleep,
) -> Evidence:
    """Read everything that was named.

    Args:
        sources: addresses of servers, or files: metrics pages, benchmark results, traces, prompts.
        limits: what is to be kept.
        without: benchmark results of the same load without a technique.
        model: the one to look at, where a page has several.
        seconds: from one look at a server to a second one; 0 looks once, and counts from its start.
        sleep: passes that time.

    Raises ValueError, naming the source, for what is none of these, for two traces, or for pages that do not
    go together; OSError for a file that cannot be opened.
    """
    pages: list[MetricsPage] = []
    runs: list[BenchmarkRun] = []
    traffic: list[Traffic] = []
    for source in sources:
        if _is_address(source):
            pages += _look(source, seconds, sleep)
            continue
        found = read_source(Path(source))
        match found:
            case MetricsPage():
                pages.append(found)
            case Traffic():
                traffic.append(found)
            case _:
                runs += found
    if len(traffic) > 1:
        raise ValueError(f"{len(traffic)} traces or prompt files: advice is about one")
    return Evidence(
        limits=limits,
        known_server=ServerWindow(open_window(pages, model)) if pages else None,
        known_traffic=traffic[0] if traffic else None,
        known_runs=runs,
        runs_without={name: read_runs(path) for name, path in (without or {}).items()},
    )


def read_source(path: Path) -> MetricsPage | Traffic | list[BenchmarkRun]:
    """A file, whichever it is. Raises ValueError, naming it, for another; OSError if it cannot be opened."""
    if path.suffix == ".gz":
        return prompt_traffic(path.name, read_prompts(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}") from None
    first = next((line for line in text.splitlines() if line.strip()), "")
    if first.startswith("#") or first.startswith(("vllm:", "jaxserve:")):
        return parse_page(str(path), text)
    whole = _json(text)
    if isinstance(whole, list) or (isinstance(whole, dict) and "output_throughput" in whole):
        return parse_runs(str(path), whole)
    line = _json(first)
    if isinstance(line, dict) and not ({"arrival", "timestamp"} & line.keys()):
        return prompt_traffic(path.name, read_prompts(path))
    if isinstance(line, dict) or "," in first:
        return trace_traffic(read_trace(path))
    raise ValueError(
        f"{path} is nothing that advice can rest on: expected a metrics page, a result of "
        "benchmarks.serving, a trace, or JSON lines of prompts"
    )


def read_runs(path: Path) -> list[BenchmarkRun]:
    """A benchmark result. Raises ValueError, naming the file, for another one."""
    found = read_source(path)
    if not isinstance(found, list):
        raise ValueError(f"{path} is not a result of benchmarks.serving")
    return found


def _json(text: str) -> Any:
    """The value, or None for what is no JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _is_address(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _look(address: str, seconds: float, sleep: Callable[[float], object]) -> list[MetricsPage]:
    """A server's page, twice if there is time between."""
    parts = urlsplit(address)
    address = urlunsplit(parts if parts.path.strip("/") else parts._replace(path=_METRICS_PATH))
    pages = [_fetch(address)]
    if seconds:
        sleep(seconds)
        pages.append(_fetch(address))
    return pages


def _fetch(address: str) -> MetricsPage:
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as response:
            content = response.read(_LARGEST_PAGE + 1)
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ValueError(f"{address} does not answer with a metrics page: {reason}") from None
    if len(content) > _LARGEST_PAGE:
        raise ValueError(f"{address} answers with more than {_LARGEST_PAGE} bytes, which is no metrics page")
    return parse_page(address, content.decode("utf-8", "replace"))
