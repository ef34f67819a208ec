"""A fake engine of several replicas, each of which is a fake engine that knows nothing of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

from jaxserve.plan import EngineLimits, IntArray, SlotLoad, StepHandle, StepPlan, StepResult
from jaxserve.replica_plans import split_plan
from tests.fake_engine import FakeEngine
from tests.fake_turns import slots_under_way


class FakeReplicas:
    """A StepEngine. What one replica is told of must be its own: the same pages are others elsewhere."""

    def __init__(self, limits: EngineLimits) -> None:
        self._stride = limits.num_slots // limits.num_replicas
        self.limits = limits
        own = dataclasses.replace(limits, num_slots=self._stride, num_replicas=1, decode_groups=1)
        self.replicas = [FakeEngine(own) for _ in range(limits.num_replicas)]
        self.plans: list[StepPlan] = []
        self.loads: list[SlotLoad] = []
        self._in_flight: list[StepPlan] = []

    @property
    def domain_of(self) -> Callable[[SlotLoad], Hashable]:
        return self.replicas[0].domain_of

    @domain_of.setter
    def domain_of(self, domain_of: Callable[[SlotLoad], Hashable]) -> None:
        for replica in self.replicas:
            replica.domain_of = domain_of

    def load_slot(self, load: SlotLoad) -> None:
        replica, slot = divmod(load.slot, self._stride)
        self.replicas[replica].load_slot(dataclasses.replace(load, slot=slot))
        self.loads.append(load)

    def load_masks(
        self, slots: IntArray, masks: npt.NDArray[np.uint32], ahead: IntArray | None = None
    ) -> None:
        for number, replica in enumerate(self.replicas):
            own = slots // self._stride == number
            if own.any():
                local = slots[own] - number * self._stride
                replica.load_masks(local, masks[own], None if ahead is None else ahead[own])

    def dispatch(self, plan: StepPlan) -> StepHandle:
        # Of the groups of all: a tick takes those of every replica on.
        under_way = slots_under_way(self._in_flight, self.limits)
        assert under_way.isdisjoint(plan.slots.tolist() if plan.shape.decode else ())
        self._in_flight.append(plan)
        parts = split_plan(plan, len(self.replicas), self._stride)
        assert sum(len(part.slots) for part in parts) == len(plan.slots)
        assert sum(len(part.grants) for part in parts) == len(plan.grants)
        handles = [
            (replica, replica.dispatch(part))
            for replica, part in zip(self.replicas, parts, strict=True)
            if len(part.slots)
        ]
        self.plans.append(plan)
        return StepHandle(plan, handles)

    def collect(self, handle: StepHandle) -> StepResult:
        self._in_flight.pop(0)
        results = [replica.collect(part) for replica, part in handle.device_result]

        def joined(name: str) -> np.ndarray:
            # Each iteration has the rows of all replicas.
            columns = [getattr(result, name) for result in results]
            num = handle.plan.num_iterations
            split = [column.reshape(num, -1, *column.shape[1:]) for column in columns]
            whole = np.concatenate(split, axis=1)
            return whole.reshape(-1, *whole.shape[2:])

        return StepResult(*(joined(field.name) for field in dataclasses.fields(StepResult)))


def fake_engine(limits: EngineLimits) -> FakeEngine | FakeReplicas:
    """An engine of one replica, or of several."""
    return FakeEngine(limits) if limits.num_replicas == 1 else FakeReplicas(limits)
