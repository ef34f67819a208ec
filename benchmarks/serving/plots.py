"""Pictures of latency against load. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxserve.bench.figures import Figures

_STATISTICS = {"p99": "tab:red", "mean": "tab:orange", "median": "tab:blue"}


def draw_sweep(load_name: str, loads: Sequence[float], runs: Sequence[Figures], path: Path) -> None:
    """Write a PNG: time to the first token, per token and of all, and throughput, over the load of each run.

    Raises ImportError, saying what to install, without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib (pip install matplotlib): {error}") from error
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True)
    for axis, name in zip(axes.flat, ("ttft", "tpot", "e2el"), strict=False):
        for statistic, color in _STATISTICS.items():
            values = [run[f"{statistic}_{name}_ms"] for run in runs]
            axis.plot(loads, values, marker="o", color=color, label=statistic)
        axis.set_ylabel(f"{name.upper()} (ms)")
        axis.set_ylim(bottom=0)
        axis.legend()
    rates = axes[1, 1]
    rates.plot(loads, [run["output_throughput"] for run in runs], marker="o", color="tab:green")
    rates.set_ylabel("output tokens/s")
    rates.set_ylim(bottom=0)
    if runs[0]["request_goodput"] is not None:
        good = rates.twinx()
        good.plot(loads, [run["request_goodput"] for run in runs], marker="s", color="tab:purple")
        good.set_ylabel("goodput (requests/s)", color="tab:purple")
        good.set_ylim(bottom=0)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel(load_name)
    figure.savefig(path, dpi=110)
