"""Which decode groups are between the stages of a pipeline, as the host keeps count of them.

The device's half is `jaxserve.engine.ticks`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from jaxserve.plan import IntArray, StepHandle


class Turns:
    """The steps of the groups that have entered and not left, the latest first."""

    def __init__(self, num_groups: int) -> None:
        """`num_groups`: 1 where a decode step takes its sequences through all stages."""
        self._under_way: deque[StepHandle | None] = deque([None] * (num_groups - 1))
        self.in_turn = num_groups > 1
        """Whether a step of a decode shape is a tick."""

    @property
    def empty(self) -> bool:
        """Whether no group is under way."""
        return not any(self._under_way)

    def holds(self, slots: IntArray) -> bool:
        """Whether any of the slots is in a group under way: it cannot enter before that has left."""
        wanted = set(slots.tolist())
        return any(handle and not wanted.isdisjoint(handle.plan.slots.tolist()) for handle in self._under_way)

    @property
    def num_rows(self) -> int:
        """Rows of the shape that holds each group under way."""
        return max((handle.plan.shape.rows for handle in self._under_way if handle), default=0)

    def tick(self, entering: StepHandle | None, result: Any) -> None:
        """A tick has been started, which a group enters or none; the result is that of the one leaving."""
        self._under_way.appendleft(entering)
        leaving = self._under_way.pop()
        if leaving is not None:
            leaving.device_result = result
