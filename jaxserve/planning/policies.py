"""The schedulers that simulations compare, by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from jaxserve.loop import HostLoop
from jaxserve.plan import EngineLimits
from jaxserve.planning.simulator import Contender
from jaxserve.planning.virtual_engine import VirtualClock, VirtualEngine
from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.overload import AdmissionGate


def contender(policy: SchedulerPolicy, *, gated: bool) -> Contender:
    """The product's loop under a policy; with its door, or letting everybody in to wait."""
    gate = partial(_make_gate, policy) if gated else None
    return Contender(make_loop=partial(_make_loop, policy), make_gate=gate)


def _make_loop(policy: SchedulerPolicy, engine: VirtualEngine, clock: VirtualClock) -> HostLoop:
    return HostLoop(engine, clock=clock, policy=policy)


def _make_gate(policy: SchedulerPolicy, limits: EngineLimits) -> AdmissionGate:
    return AdmissionGate(
        policy,
        num_slots=limits.num_slots,
        num_pages=min(limits.num_pages) - 1,
        page_size=limits.page_size,
    )


POLICIES: Mapping[str, Contender] = {
    "fcfs": contender(SchedulerPolicy.first_come(), gated=False),
    "fair": contender(SchedulerPolicy(), gated=True),
}
"""First come, first served, as engines without classes do; ours, with the default classes and limits."""


def find_contender(name: str) -> Contender:
    """One of `POLICIES`, or a policy file (.toml or .json) behind its door.

    Raises ValueError for a name that is neither, or a policy that contradicts itself.
    """
    if name in POLICIES:
        return POLICIES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"policy {name!r} is neither one of {', '.join(POLICIES)} nor a file")
    return contender(SchedulerPolicy.read(path), gated=True)
