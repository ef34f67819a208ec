"""A plan as each replica of an engine sees it: its own sequences, on slots numbered from 0."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.plan import IntArray, StepPlan


def split_plan(plan: StepPlan, num_replicas: int, stride: int) -> list[StepPlan]:
    """The part of each replica, some perhaps without sequences; all in the shape of the whole.

    Args:
        plan: of the whole engine.
        num_replicas: that it has.
        stride: slots of each.

    Raises ValueError for sequences that are not in the order of the replicas, whose results could not be
    told apart, and for a draft model's part, which has one replica.
    """
    if plan.unread is not None or plan.reads is not None:
        raise ValueError(f"a plan for a draft model in one of {num_replicas} replicas")
    numbers, of_grant = plan.slots // stride, plan.grants[:, 1] // stride
    if (np.diff(numbers) < 0).any():
        raise ValueError(f"slots {plan.slots.tolist()} are not in the order of replicas of {stride} slots")
    ends = np.searchsorted(numbers, np.arange(num_replicas + 1)).tolist()
    rows = np.concatenate([[0], np.cumsum(plan.num_logit_rows)]).tolist()
    parts: list[StepPlan] = []
    for replica in range(num_replicas):
        first, end = ends[replica], ends[replica + 1]
        parts.append(
            dataclasses.replace(
                plan,
                slots=plan.slots[first:end] - replica * stride,
                num_tokens=plan.num_tokens[first:end],
                num_logit_rows=plan.num_logit_rows[first:end],
                grants=_local(plan.grants[of_grant == replica], replica * stride),
                drafts=None if plan.drafts is None else plan.drafts[rows[first] : rows[end]],
            )
        )
    return parts


def _local(grants: IntArray, first_slot: int) -> IntArray:
    return grants - np.array([0, first_slot, 0, 0], np.int32)
