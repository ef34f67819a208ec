"""Pictures of simulations. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxserve.planning.simulator import Simulation


def draw_timelines(simulations: Mapping[str, Simulation], path: str | Path) -> None:
    """Write a PNG: how many ran and waited, how full the pool was, and each request's wait, over time.

    A column for each simulation, by its label. Raises ImportError, saying what to install, without
    matplotlib; ValueError if there is nothing to draw.
    """
    if not simulations:
        raise ValueError("there is no simulation to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib (pip install matplotlib): {error}") from error
    figure = Figure(figsize=(1.5 + 5.5 * len(simulations), 8), layout="constrained")
    FigureCanvasAgg(figure)
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
