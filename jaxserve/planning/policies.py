"""The schedulers that simulations compare, by name."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.loop import HostLoop
from jaxserve.planning.simulator import MakeLoop
from jaxserve.planning.virtual_engine import VirtualClock, VirtualEngine


def first_come_first_served(engine: VirtualEngine, clock: VirtualClock) -> HostLoop:
    """Everybody in the order of arrival, and nobody refused."""
    return HostLoop(engine, clock=clock)


POLICIES: Mapping[str, MakeLoop] = {"fcfs": first_come_first_served}
