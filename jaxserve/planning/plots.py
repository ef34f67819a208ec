"""Pictures of simulations and of plans. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.planning.plan_records import Row
from jaxserve.planning.report import Target
from jaxserve.planning.simulator import Simulation


def draw_timelines(simulations: Mapping[str, Simulation], path: str | Path) -> None:
    """Write a PNG: how many ran and waited, how full the pool was, and each request's wait, over time.

    A column for each simulation, by its label. Raises ImportError, saying what to install, without
    matplotlib; ValueError if there is nothing to draw.
    """
    if not simulations:
        raise ValueError("there is no simulation to draw")
    figure = _figure(1.5 + 5.5 * len(simulations), 8)
    axes = figure.subplots(3, len(simulations), squeeze=False, sharex="col", sharey="row")
    for column, (label, simulation) in enumerate(simulations.items()):
        _draw_column(axes[:, column], label, simulation)
    for row, name in enumerate(("requests", "pages in use, %", "seconds")):
        axes[row, 0].set_ylabel(name)
    figure.savefig(path, dpi=110)


def _draw_column(axes: np.ndarray, label: str, simulation: Simulation) -> None:
    timeline, records, limits = simulation.timeline, simulation.records, simulation.limits
    load, pool, waits = axes
    load.set_title(label)
    load.plot(timeline.time, timeline.waiting, label="waiting", color="tab:red", linewidth=1)
    load.plot(timeline.time, timeline.running, label="running", color="tab:blue", linewidth=1)
    load.set_yscale("symlog", linthresh=10)
    load.legend(loc="upper right")
    for group, (window, pages) in enumerate(zip(limits.windows, limits.num_pages, strict=True)):
        used = 100 * (1 - timeline.free_pages[:, group] / (pages - 1))
        pool.plot(timeline.time, used, label=f"window {window}" if window else "full attention", linewidth=1)
    pool.set_ylim(0, 105)
    pool.legend(loc="lower right")
    dot = {"s": 3, "linewidths": 0}
    waits.scatter(records.arrival, records.ttft, label="to the first token", color="tab:green", **dot)
    refused = records.rejected
    waits.scatter(
        records.arrival[refused], np.full(refused.sum(), 1e-3), label="refused", color="black", **dot
    )
    waits.set_yscale("log")
    waits.set_xlabel("seconds")
    waits.legend(loc="upper left")
    for axis in axes:
        axis.grid(alpha=0.3)


def draw_plan(rows: Sequence[Row], limits: Target, path: str | Path) -> None:
    """Write a PNG: each candidate's memory, the rate it serves, and its latencies beside the limits.

    Raises ImportError, saying what to install, without matplotlib; ValueError if there is nothing to draw.
    """
    if not rows:
        raise ValueError("there is no candidate to draw")
    figure = _figure(14, 2.2 + 0.4 * len(rows))
    memory, rate, first, each = figure.subplots(1, 4, sharey=True)
    places = np.arange(len(rows))
    weights = np.array([row.memory.weight_bytes for row in rows]) / 1e9
    chips = np.array([row.memory.chip_bytes for row in rows]) / 1e9
    memory.barh(places, chips, color="lightgrey", label="a chip")
    memory.barh(places, weights, color="tab:orange", label="weights")
    memory.set_xlabel("GB of a chip")
    rate.barh(places, [row.saturated for row in rows], color="lightgrey", label="without limits")
    rate.barh(places, [row.goodput for row in rows], color="tab:green", label="within the limits")
    rate.set_xlabel("requests a second, one engine")
    _draw_latencies(first, places, [row.ttft_p95 for row in rows], limits.ttft, "TTFT p95, seconds")
    _draw_latencies(each, places, [row.tpot_p95 for row in rows], limits.tpot, "TPOT p95, seconds")
    labels = [
        f"{row.precision}, {row.mesh_name}"
        + ("" if row.acceptance is None else f", {row.acceptance:.0%} accepted")
        for row in rows
    ]
    memory.set_yticks(places, [f"{label}: {row.bound}" for label, row in zip(labels, rows, strict=True)])
    memory.invert_yaxis()
    for axis in (memory, rate, first, each):
        axis.grid(axis="x", alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)


def _draw_latencies(axis: Any, places: np.ndarray, seconds: list[float], limit: float, name: str) -> None:
    axis.barh(places, np.nan_to_num(seconds), color="tab:blue")
    if limit < np.inf:
        axis.axvline(limit, color="tab:red", label="limit")
    axis.set_xlabel(name)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib (pip install matplotlib): {error}") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
