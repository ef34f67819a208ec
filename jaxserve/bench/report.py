"""Results as one HTML page that needs nothing else: no network, no script, pictures inside."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from jaxserve.bench.cells import MATRIX
from jaxserve.bench.compare import Comparison, Verdict, conclusions
from jaxserve.bench.plots import draw_comparison, draw_matrix, draw_requests
from jaxserve.bench.result import CellResult, Result
from jaxserve.bench.summary import CellSummary, remarks

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  color: #1f2937; background: #fff; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 0.2rem; }
p.lead { color: #6b7280; margin-top: 0.2rem; }
table { border-collapse: collapse; margin: 0.6rem 0; } .wide { overflow-x: auto; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #e5e7eb; text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { font-weight: 600; color: #374151; border-bottom: 2px solid #d1d5db; }
th:first-child, td:first-child, table.facts td, .words { text-align: left; white-space: normal; }
table.facts td:first-child { color: #6b7280; white-space: nowrap; }
.good { color: #15803d; } .bad { color: #b91c1c; font-weight: 600; }
.a { color: #2563eb; font-weight: 600; } .b { color: #ea580c; font-weight: 600; }
img { max-width: 100%; height: auto; } pre { background: #f3f4f6; padding: 0.8rem; overflow-x: auto; }
ul { margin: 0.3rem 0; padding-left: 1.2rem; }
"""
_MARKS = {Verdict.A: "a", Verdict.B: "b"}


def result_page(result: Result, ttft: float, tpot: float) -> str:
    """One result at limits in seconds. Raises ValueError without matplotlib."""
    served = result.served
    lead = f"{served.root or served.model} · {result.date} · {result.seconds:.0f} s"
    return _page(f"{result.config['name']}: {served.model}", lead, _result_parts(result, ttft, tpot))


def comparison_page(comparison: Comparison, a: Result, b: Result) -> str:
    """Two results side by side. Raises ValueError without matplotlib."""
    return _page("Which is better where", comparison.lead(), _comparison_parts(comparison, a, b))


def _result_parts(result: Result, ttft: float, tpot: float) -> Iterator[str]:
    yield "<h2>Were the answers right?</h2>"
    rows = [
        (
            f'<span class="{"good" if one.passed else "bad"}">{"passed" if one.passed else "failed"}</span>',
            escape(one.name),
            escape(one.detail),
        )
        for one in result.checks
    ]
    yield _table(("", "check", "found"), rows, words=(1, 2))
    yield f"<h2>Figures at {ttft:g} s to the first token and {tpot:g} s for each further one</h2>"
    yield _cells_table(result, ttft, tpot)
    yield _list(f"left out: {label}" for label in result.left_out)
    if picture := draw_matrix(result, ttft, tpot):
        yield "<h2>The matrix</h2><p>Uncached tokens + reusable prefix → output. Bars: the range over the "
        yield "repeats. Dotted: the limit, where it is near.</p>"
        yield _image(picture, "latency and rates over the concurrency")
    scenarios = [cell for cell in result.cells if cell.kind != MATRIX and cell.runs]
    if scenarios:
        yield "<h2>Scenarios</h2><p>The first repeat of each. A request is pale until its first token; a "
        yield "cross is where its client left, a circle where it failed.</p>"
    for cell in scenarios:
        yield from _scenario_parts(cell)
    yield "<h2>What was measured, and on what</h2>"
    yield _facts(_facts_of(result))
    yield f"<details><summary>the whole configuration</summary><pre>{_json(result.config)}</pre></details>"


def _scenario_parts(cell: CellResult) -> Iterator[str]:
    yield f"<h3>{escape(cell.name)} ({escape(cell.kind)})</h3>"
    yield _list(remarks(cell))
    yield _image(draw_requests(cell), f"requests of {cell.name} over time")


def _cells_table(result: Result, ttft: float, tpot: float) -> str:
    head = ("cell", "goodput/s", "kept", "TTFT ms", "99 %", "TPOT ms", "99 %", "output tokens/s", "cached")
    rows: list[Sequence[str]] = []
    for cell in result.cells:
        if cell.runs:
            rows.append((escape(cell.name), *CellSummary.of(cell, ttft, tpot).texts()))
    return _table(head, rows)


def _comparison_parts(comparison: Comparison, a: Result, b: Result) -> Iterator[str]:
    yield _list(conclusions(comparison))
    head = ("cell", "A /s", "B /s", "B over A", "kept A", "kept B", "")
    rows = [
        (
            escape(cell.name),
            *cell.texts(),
            f'<span class="{_MARKS.get(cell.verdict, "")}">{escape(cell.verdict.value)}</span>',
        )
        for cell in comparison.cells
    ]
    yield _table(head, rows, words=(6,))
    yield _list(f"only one of them has: {name}" for name in comparison.only_one)
    yield _image(draw_comparison(comparison), "goodput of both in each cell")
    yield "<h2>What differs</h2>"
    yield _list(comparison.differences) or "<p>Nothing that is known.</p>"
    for name, result in (("A", a), ("B", b)):
        yield f"<h2>{name}</h2>"
        yield _facts(_facts_of(result))


def _facts_of(result: Result) -> Iterator[tuple[str, str]]:
    served = result.served
    yield "model", f"{served.root or served.model} ({served.fingerprint or 'no fingerprint'})"
    yield "precision", f"{served.precision or 'unknown'}, KV pool in {served.kv_format or 'unknown'}"
    yield "device", served.device or "unknown"
    yield "engine", served.version or "unknown"
    if served.arguments:
        yield "arguments", served.arguments
    yield from served.chosen.items()
    yield "client", ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield "machine", f"{result.machine.text()}; load {result.load:.1f} at the start"
    yield "configuration", f"{result.config['name']}, {result.config_digest}"
    yield "requests", result.plan_digest


def _page(title: str, lead: str, parts: Iterator[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8" />\n'
        f'<meta name="viewport" content="width=device-width" />\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="lead">{escape(lead)}</p>\n{body}\n</body>\n</html>\n'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """Cells are HTML already; `words`: columns of text."""

    def line(cells: Sequence[str], tag: str) -> str:
        marks = (' class="words"' if place in words else "" for place in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{m}>{c}</{tag}>" for c, m in zip(cells, marks, strict=True)) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>\n{line(head, "th")}\n{body}\n</table></div>'


def _facts(facts: Iterator[tuple[str, str]]) -> str:
    rows = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts)
    return f'<table class="facts">\n{rows}\n</table>'


def _list(lines: Iterator[str] | Sequence[str]) -> str:
    entries = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>\n{entries}\n</ul>" if entries else ""


def _image(svg: str, description: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(description)}" src="data:image/svg+xml;base64,{data}" />'


def _json(value: Mapping[str, Any]) -> str:
    return escape(json.dumps(value, indent=2))
