"""Pictures of results, as SVG. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.bench.cells import MATRIX
from jaxserve.bench.compare import Comparison
from jaxserve.bench.result import CellResult, CellRun, Result
from jaxserve.bench.summary import CellSummary, Over

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777")
_A, _B = _COLORS[0], _COLORS[1]
_STYLES = {"cold": "-", "warm": "--"}
_MAX_LABEL = 60


def require_matplotlib() -> None:
    """Raises ValueError, saying what to install, if it is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"drawing needs matplotlib (pip install 'jaxserve[plots]'): {error}") from error


def draw_matrix(result: Result, ttft: float, tpot: float) -> str | None:
    """Latency and rates over the concurrency, a line for each other combination; None without a matrix.

    Bars are the range over the repeats; lines across are the limits.
    """
    cells = [cell for cell in result.cells if cell.kind == MATRIX and cell.runs]
    if not cells:
        return None
    lines: dict[tuple[str, str], list[tuple[int, CellSummary]]] = defaultdict(list)
    for cell in cells:
        axes = cell.settings
        label = f"{axes['uncached']}+{axes['prefix']} → {axes['output']}, {axes['sampling']}"
        point = (axes["concurrency"], CellSummary.of(cell, ttft, tpot))
        lines[label, axes["cache"]].append(point)
    figure = _figure(11, 7)
    panels = figure.subplots(2, 2)
    labels = list(dict.fromkeys(label for label, _ in lines))
    for (label, cache), points in lines.items():
        color = _COLORS[labels.index(label) % len(_COLORS)]
        style = {"color": color, "linestyle": _STYLES[cache], "label": f"{label}, {cache}"}
        points.sort(key=lambda point: point[0])
        loads = [load for load, _ in points]
        figures = zip(*(_four(one) for _, one in points), strict=True)
        for panel, values in zip(panels.flat, figures, strict=True):
            _draw_line(panel, loads, values, style)
    titles = ("median TTFT, ms", "median TPOT, ms", "output, tokens/s", "goodput, requests/s")
    for panel, title, limit in zip(panels.flat, titles, (ttft, tpot, None, None), strict=True):
        _finish(panel, title, None if limit is None else limit * 1e3)
    for panel in panels.flat:
        panel.set_xticks(sorted({cell.settings["concurrency"] for cell in cells}))
        panel.set_xlabel("requests at once")
    handles, names = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return _svg(figure)


def draw_requests(cell: CellResult) -> str:
    """Each request of a scenario's first run over time: pale until its first token, then dark; a cross where
    it was cancelled, a circle where it was not answered."""
    run = cell.runs[0]
    figure = _figure(11, 1.2 + 0.11 * len(run.requests))
    axis = figure.subplots()
    groups = list(dict.fromkeys(one.group for one in run.requests))
    for place, group in enumerate(groups):
        _draw_group(axis, run, group, _COLORS[place % len(_COLORS)])
    if cell.kind == "failure":
        axis.axvline(cell.settings["at"], color="black", linestyle=":", label="the fault")
    if any(groups) or cell.kind == "failure":
        axis.legend(loc="lower left", fontsize=8)  # Where nothing is: later requests are further down.
    axis.set_xlabel("seconds")
    axis.set_ylabel("requests")
    axis.set_yticks([])
    axis.invert_yaxis()
    return _svg(figure)


def draw_comparison(comparison: Comparison) -> str:
    """Goodput of both in each cell, with the range over the repeats."""
    cells = comparison.cells
    figure = _figure(11, 1.5 + 0.5 * len(cells))
    axis = figure.subplots()
    for offset, name, color in ((-0.2, "A", _A), (0.2, "B", _B)):
        values = [cell.a if name == "A" else cell.b for cell in cells]
        places = [place + offset for place in range(len(cells))]
        means = [value.mean for value in values]
        axis.barh(places, means, 0.38, color=color, label=name, xerr=_ranges(values), error_kw={"capsize": 2})
    axis.set_yticks(range(len(cells)), [cell.name[:_MAX_LABEL] for cell in cells], fontsize=8)
    axis.margins(y=0.02)
    axis.invert_yaxis()
    axis.set_xlabel("goodput, requests/s")
    axis.grid(axis="x", alpha=0.3)
    axis.legend()
    return _svg(figure)


def _four(one: CellSummary) -> tuple[Over, Over, Over, Over]:
    return one.ttft, one.tpot, one.output_rate, one.goodput


def _draw_line(panel: Axes, loads: Sequence[int], values: Sequence[Over], style: dict[str, Any]) -> None:
    means = [value.mean for value in values]
    panel.errorbar(loads, means, yerr=_ranges(values), marker="o", markersize=4, capsize=3, **style)


def _ranges(values: Sequence[Over]) -> tuple[list[float], list[float]]:
    """How far the repeats reach below and above their means."""
    below = [max(0.0, value.mean - value.low) for value in values]
    return below, [max(0.0, value.high - value.mean) for value in values]


def _finish(panel: Axes, title: str, limit: float | None) -> None:
    panel.set_title(title, fontsize=10, loc="left")
    panel.grid(alpha=0.3)
    low, high = 0.0, panel.get_ylim()[1]
    panel.set_ylim(low, high)
    if limit is not None and limit <= high:  # One that is far off would flatten everything.
        panel.axhline(limit, color="black", linewidth=1, linestyle=":")


def _draw_group(axis: Axes, run: CellRun, group: str, color: str) -> None:
    rows = [(place, one) for place, one in enumerate(run.requests) if one.group == group]
    told = [(place, one) for place, one in rows if one.latency > 0]
    places = [place for place, _ in told]
    starts = [one.start for _, one in told]
    firsts = [one.start + one.ttft for _, one in told]
    ends = [one.start + one.latency for _, one in told]
    axis.hlines(places, starts, firsts, color=color, alpha=0.35, linewidth=4)
    axis.hlines(places, firsts, ends, color=color, linewidth=4, label=group)
    left = [(one.start + one.latency, place) for place, one in rows if one.cancelled]
    failed = [(one.start + one.latency, place) for place, one in rows if one.error]
    for points, marker in ((left, "x"), (failed, "o")):
        if points:
            axis.scatter(*zip(*points, strict=True), marker=marker, color="black", s=18, zorder=3)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "jaxserve"}):  # The same picture has the same ids.
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
