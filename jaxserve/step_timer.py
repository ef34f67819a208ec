"""How long a loop's steps take, for those who plan by it."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxserve.loop_stats import StepCounts
from jaxserve.scheduling import ScheduledStep, Scheduler


class StepTimer:
    """Tells a scheduler and the counts what each collected step took."""

    def __init__(self, scheduler: Scheduler, counts: StepCounts, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._counts = counts
        self._clock = clock
        self._collected_at = -math.inf
        self.kept_busy = False
        """Whether the latest step left something to go on with at once."""

    def observe(self, step: ScheduledStep, dispatched_at: float) -> None:
        """A step has been collected: it took the time since its dispatch or the end of the one before."""
        now = self._clock()
        started = max(dispatched_at, self._collected_at)
        if self._scheduler.drafting is not None:
            since = self._collected_at if self.kept_busy else dispatched_at
            self._scheduler.drafting.observe(step, max(0.0, now - since))
        self._collected_at = now
        if step.plan.reads is not None:
            return  # It says nothing of others.
        seconds = max(0.0, now - started) / step.plan.num_iterations
        if step.decodes_only:
            num_steps = step.plan.num_iterations
            self._counts.time_decode(step.plan.shape.rows, num_steps, num_steps * seconds)
        self._scheduler.budget.observe(step.plan.shape.rows, step.most_rows, seconds)
