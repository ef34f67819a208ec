"""Whose turn it is to decode, where a decode step is one tick of a pipeline.

A group enters the first stage in one step and leaves the last one in the step that is as many later as there
are other stages. Nobody can enter again before that; so there are as many groups as stages, and each has its
turn when the others have had theirs. Groups are not kept: a turn is for as many as make the groups even, of
those who are not under way. Whoever is ready is among them within as many steps as there are groups: the
others of these steps are all different, and not so many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.plan import EngineLimits
from jaxserve.scheduling.step import ScheduledStep, StepBuilder


def steps_under_way(in_flight: Sequence[ScheduledStep], limits: EngineLimits) -> list[ScheduledStep]:
    """The steps in flight whose groups may be in the pipeline still: the latest, unless others followed.

    Args:
        in_flight: those planned and not retired, the oldest first.
        limits: of the engine.
    """
    latest = in_flight[len(in_flight) - min(limits.decode_groups - 1, len(in_flight)) :]
    others = [number for number, step in enumerate(latest) if not step.plan.shape.decode]
    return list(latest[others[-1] + 1 if others else 0 :])


def take_turns(
    steps: Sequence[StepBuilder], under_way: Sequence[ScheduledStep], limits: EngineLimits
) -> None:
    """Leave in a step that only decodes those whose turn it is, perhaps nobody.

    Args:
        steps: the parts of the replicas; nothing happens if any computes more than a row of each sequence.
        under_way: from `steps_under_way`.
        limits: of the engine.
    """
    if not all(step.decodes_only for step in steps):
        return  # It will wait until nobody is under way.
    num_groups, stride = limits.decode_groups, limits.num_slots // limits.num_replicas
    is_under_way = np.zeros(limits.num_slots, np.bool_)
    num_under_way = np.zeros(limits.num_replicas, np.int32)
    for step in under_way:
        is_under_way[step.plan.slots] = True
        num_under_way[np.unique(step.plan.slots // stride)] += 1
    for step, num_others in zip(steps, num_under_way.tolist(), strict=True):
        ready = step.decoding[~is_under_way[step.decoding]]
        even, left = -(-len(step.decoding) // num_groups), -(-len(ready) // (num_groups - num_others))
        step.narrow(ready[: min(even, left)])
