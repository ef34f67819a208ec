"""What a host loop counts and times of itself, and how it stood after a step."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxserve.prefill_side import PrefillStatistics
from jaxserve.scheduling.draft_tally import SpeculationStatistics
from jaxserve.scheduling.newcomers import Hurdle
from jaxserve.scheduling.page_swap import SwapStatistics
from jaxserve.scheduling.prefix_tree import PrefixStatistics

Stage = Literal["plan", "load", "dispatch", "wait", "commit", "deliver", "idle"]
STAGES: tuple[Stage, ...] = ("plan", "load", "dispatch", "wait", "commit", "deliver", "idle")
"""Where a loop's time goes: choosing the next step, filling slots, starting the step, waiting for the device,
taking its tokens, making answers of them; and whatever its caller does between two steps."""
STEP_ROWS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Upper bounds of the buckets in which steps are counted by their rows; one more has no bound."""


class DecodeSteps(NamedTuple):
    """Steps of one size that did nothing but decode, each of them on its own."""

    num_steps: int = 0
    seconds: float = 0.0
    """All together, each from the end of the step before it."""


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """How a loop stood after a step. Totals count from its beginning."""

    num_open: int
    """Requests that had not ended."""
    num_running: int
    """Samples in slots."""
    num_waiting: int
    """Samples in the queue."""
    num_free_pages: tuple[int, ...]
    """Of each cache group; page 0, which is never given out, is not among them."""
    num_steps: int
    """Steps collected."""
    num_sampled: int
    """Tokens handed out."""
    num_prompt_tokens: int
    """Of requests that have begun to answer."""
    num_preemptions: int
    step_rows: tuple[int, ...]
    """Steps by their rows, a count for each of STEP_ROWS_BUCKETS and one for what lies beyond."""
    num_step_rows: int
    """Rows of all steps."""
    stage_seconds: Mapping[Stage, float]
    """Seconds spent in each stage; together they are the loop's life."""
    prefixes: PrefixStatistics | None = None
    """What reuse has saved; None where no prefix is reused."""
    swaps: SwapStatistics | None = None
    """What the host's memory has kept; None where it keeps nothing."""
    speculation: SpeculationStatistics | None = None
    """What drafting has brought; None where nothing is drafted."""
    num_recomputed: int = 0
    """Tokens that preempted samples had computed, and did not find again when they went on."""
    num_kept_out: Mapping[Hurdle, int] = field(default_factory=dict[Hurdle, int])
    """Plannings of a step that left samples waiting, by what these waited for."""
    decode_steps: Mapping[int, DecodeSteps] = field(default_factory=dict[int, DecodeSteps])
    """By the rows of the compiled step."""
    prefills: PrefillStatistics | None = None
    """What was computed of prompts elsewhere; None where all is computed in one place."""


class LoopClock:
    """Adds up where the time goes: every moment belongs to the stage that was entered last."""

    __slots__ = ("_now", "_seconds", "_since", "_stage")

    def __init__(self) -> None:
        self._now = time.perf_counter
        self._seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
        self._stage: Stage = "idle"
        self._since = self._now()

    def enter(self, stage: Stage) -> None:
        now = self._now()
        self._seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def read(self) -> Mapping[Stage, float]:
        """Seconds by stage until now."""
        self.enter(self._stage)
        return dict(self._seconds)


class StepCounts:
    """Counts steps, their rows and their tokens."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_sampled = 0
        self.num_rows = 0
        self.by_rows = [0] * (len(STEP_ROWS_BUCKETS) + 1)
        self.decode_steps: dict[int, DecodeSteps] = {}

    def add_step(self, num_rows: int) -> None:
        self.num_steps += 1
        self.num_rows += num_rows
        self.by_rows[bisect_left(STEP_ROWS_BUCKETS, num_rows)] += 1

    def time_decode(self, shape_rows: int, num_steps: int, seconds: float) -> None:
        """So many steps of a size, one after another, did nothing but decode and took so long together."""
        before = self.decode_steps.get(shape_rows, DecodeSteps())
        self.decode_steps[shape_rows] = DecodeSteps(before.num_steps + num_steps, before.seconds + seconds)
