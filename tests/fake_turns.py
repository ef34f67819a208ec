"""What a pipeline is like to whoever hands it one group after another."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.plan import EngineLimits, StepPlan


def slots_under_way(in_flight: Sequence[StepPlan], limits: EngineLimits) -> set[int]:
    """Who has entered and could not have left yet: a step of another kind has everybody leave first.

    `in_flight`: the steps that have not been collected, the oldest first.
    """
    slots: set[int] = set()
    for num_later, plan in enumerate(reversed(in_flight), 1):
        if not plan.shape.decode or num_later >= limits.decode_groups:
            return slots
        slots.update(plan.slots.tolist())
    return slots
