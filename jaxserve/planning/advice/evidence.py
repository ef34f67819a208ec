"""What advice rests on: a server's metrics, benchmark results, traffic, and the limits that are to be kept.

Whatever was not measured raises NotMeasured when a rule asks for it, with what would let the rule be judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxserve.planning.advice.benchmark_results import BenchmarkRun
from jaxserve.planning.advice.missing import NotMeasured
from jaxserve.planning.advice.server_window import ServerWindow
from jaxserve.planning.advice.traffic import Traffic

Technique = Literal["speculation", "quantization", "disaggregation"]
TECHNIQUES: tuple[Technique, ...] = ("speculation", "quantization", "disaggregation")
"""What a benchmark may have been repeated without."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Latencies that are to be kept, in seconds."""

    tpot: float | None = None
    """Time for each token after the first; None where nobody has said."""

    def __post_init__(self) -> None:
        if self.tpot is not None and not self.tpot > 0:
            raise ValueError(f"tpot limit {self.tpot} s is not above 0")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known. `server`, `traffic` and `runs` raise NotMeasured where there are none."""

    limits: Limits = field(default_factory=Limits)
    known_server: ServerWindow | None = None
    known_traffic: Traffic | None = None
    known_runs: Sequence[BenchmarkRun] = ()
    """Of the configuration as it is."""
    runs_without: Mapping[Technique, Sequence[BenchmarkRun]] = field(
        default_factory=dict[Technique, Sequence[BenchmarkRun]]
    )
    """Of the same load on a configuration without one technique."""

    @property
    def server(self) -> ServerWindow:
        if self.known_server is None:
            raise NotMeasured("a server's metrics: its URL, or a saved page")
        return self.known_server

    @property
    def traffic(self) -> Traffic:
        if self.known_traffic is None:
            raise NotMeasured("a trace, or JSON lines of prompts")
        return self.known_traffic

    @property
    def runs(self) -> Sequence[BenchmarkRun]:
        if not self.known_runs:
            raise NotMeasured("a result of `python -m benchmarks.serving --json`")
        return self.known_runs

    def without(self, technique: Technique) -> Sequence[BenchmarkRun]:
        """Runs of the same load without a technique."""
        runs = self.runs_without.get(technique)
        if not runs:
            raise NotMeasured(f"the same benchmark on a server without it: --without {technique}=FILE")
        return runs
