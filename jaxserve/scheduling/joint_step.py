"""One step of the parts that several replicas have in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from jaxserve.plan import EngineLimits, IntArray, StepPlan
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.step import ScheduledStep, ScoredRows


def join_parts(parts: Mapping[int, ScheduledStep], limits: EngineLimits, table: SlotTable) -> ScheduledStep:
    """The step of all parts, in the smallest shape that holds each of them.

    Args:
        parts: by replica, rising; all of as many iterations.
        limits: of the engine.
        table: the slots, which count the parts as planned.
    """
    steps = list(parts.values())
    plans = [step.plan for step in steps]
    assert all(plan.reads is None and plan.unread is None for plan in plans), "a draft model has one replica"
    num_logit_rows = [int(plan.num_logit_rows.sum()) for plan in plans]
    firsts = np.cumsum([0, *num_logit_rows[:-1]]).tolist()
    has_drafts = any(step.num_drafts is not None for step in steps)
    shape = limits.fit(
        max(plan.num_rows for plan in plans),
        max(len(plan.slots) for plan in plans),
        max(num_logit_rows),
        all(plan.shape.decode for plan in plans),
    )

    def joined(column: Callable[[StepPlan], IntArray]) -> IntArray:
        return np.concatenate([column(plan) for plan in plans])

    return ScheduledStep(
        StepPlan(
            joined(lambda plan: plan.slots),
            joined(lambda plan: plan.num_tokens),
            joined(lambda plan: plan.num_logit_rows),
            joined(lambda plan: plan.grants),
            shape,
            plans[0].num_iterations,
            drafts=np.concatenate(
                [_drafts_of(plan, num) for plan, num in zip(plans, num_logit_rows, strict=True)]
            )
            if has_drafts
            else None,
        ),
        tuple(load for step in steps for load in step.loads),
        tuple(request for step in steps for request in step.admitted),
        table.cohort(np.concatenate([step.cohort.slots for step in steps])),
        np.concatenate([step.rows + first for step, first in zip(steps, firsts, strict=True)]),
        tuple(
            _moved(scored, first) for step, first in zip(steps, firsts, strict=True) for scored in step.scored
        ),
        np.concatenate([_num_drafts_of(step) for step in steps]) if has_drafts else None,
        any(step.waited for step in steps),
        parts,
    )


def _drafts_of(plan: StepPlan, num_logit_rows: int) -> IntArray:
    return np.full(num_logit_rows, -1, np.int32) if plan.drafts is None else plan.drafts


def _num_drafts_of(step: ScheduledStep) -> IntArray:
    return np.zeros(len(step.rows), np.int32) if step.num_drafts is None else step.num_drafts


def _moved(scored: ScoredRows, first: int) -> ScoredRows:
    return scored._replace(first_row=scored.first_row + first)
