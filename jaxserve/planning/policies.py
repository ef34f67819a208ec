"""The schedulers that simulations compare, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from jaxserve.loop import HostLoop
from jaxserve.planning.simulator import Contender
from jaxserve.planning.virtual_engine import VirtualClock, VirtualEngine
from jaxserve.scheduling import AdmissionGate, CacheIdentity
from jaxserve.scheduling.classes import SchedulerPolicy

_CACHE = CacheIdentity(model="simulated", kv_format="simulated")


def contender(policy: SchedulerPolicy, *, gated: bool) -> Contender:
    """The product's loop under a policy, reusing prefixes; with its door, or letting everybody in to wait."""
    return Contender(make_loop=partial(_make_loop, policy, gated))


def _make_loop(policy: SchedulerPolicy, gated: bool, engine: VirtualEngine, clock: VirtualClock) -> HostLoop:
    gate = AdmissionGate.for_engine(policy, engine.limits) if gated else None
    return HostLoop(engine, clock=clock, policy=policy, gate=gate, cache=_CACHE)


POLICIES: Mapping[str, tuple[SchedulerPolicy, bool]] = {
    "fcfs": (SchedulerPolicy.first_come(), False),
    "longest-prefix": (SchedulerPolicy.longest_prefix(), False),
    "fair": (SchedulerPolicy(), True),
}
"""First come, first served, as engines without classes do; the longest cached prefix first, as engines do
that schedule for their cache; ours, with the default classes and limits. With each whether it has a door."""


def find_contender(
    name: str, *, ttft_target: float | None = None, tpot_target: float | None = None
) -> Contender:
    """One of `POLICIES`, or a policy file (.toml or .json) behind its door.

    Args:
        name: which.
        ttft_target: seconds that every class aims at instead of its own; None leaves them as they are.
        tpot_target: likewise.

    Raises ValueError for a name that is neither, or a policy that contradicts itself.
    """
    if name in POLICIES:
        policy, gated = POLICIES[name]
    elif Path(name).is_file():
        policy, gated = SchedulerPolicy.read(Path(name)), True
    else:
        raise ValueError(f"policy {name!r} is neither one of {', '.join(POLICIES)} nor a file")
    asked = {"ttft_target": ttft_target, "tpot_target": tpot_target}
    changes = {key: value for key, value in asked.items() if value is not None}
    classes = tuple(replace(one, **changes) for one in policy.classes)
    return contender(replace(policy, classes=classes), gated=gated)
