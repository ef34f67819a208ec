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
        self._to_learn: tuple[int, int, float] | None = None
        self.kept_busy = False
        """Whether the latest step left something to go on with at once."""

    def observe(self, step: ScheduledStep, dispatched_at: float) -> None:
        """A step has been collected: it took the time since its dispatch or the end of the one before."""
        self.learn()
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
        self._to_learn = step.plan.shape.rows, step.most_rows, seconds
        if not step.waited:
            self.learn()

    def learn(self) -> None:
        """Let the budget know of the latest step, if it does not yet. While a step waits for one that is
        collected, the device idles: what it took is learnt when the next one is under way."""
        if self._to_learn is not None:
            self._scheduler.budget.observe(*self._to_learn)
            self._to_learn = None
