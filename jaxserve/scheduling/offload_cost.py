"""Whether to bring pages back from a tier or to compute them again: whichever is measured to be quicker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxserve.scheduling.offload_tier import PageTransfer

_NUM_PROBED = 8
"""Pages of each group that a measurement moves."""
_LEAST_SECONDS = 1e-6
"""What a measured move takes at least: no clock shows less reliably."""
_MEMORY = 0.9
"""Weight of the past in a measured rate, for each transfer."""


class Rate:
    """Seconds that a transfer takes: a latency that is given, and bytes at a speed that is learnt."""

    def __init__(self, bytes_per_second: float, latency: float = 0.0) -> None:
        """`bytes_per_second`: what to believe before anything has been measured; `latency`: seconds.

        Raises ValueError unless the speed is above 0 and the latency not below it.
        """
        if not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second {bytes_per_second} is not above 0")
        if not latency >= 0:
            raise ValueError(f"latency {latency} is not a number of seconds from 0 up")
        self.bytes_per_second = bytes_per_second
        self.latency = latency

    def seconds(self, num_bytes: int) -> float:
        """How long so many bytes will take; nothing takes no time."""
        return self.latency + num_bytes / self.bytes_per_second if num_bytes else 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learn from a transfer. One that took no longer than the latency says nothing of the speed."""
        if num_bytes and seconds > self.latency:
            measured = num_bytes / (seconds - self.latency)
            # The mean is of seconds a byte: a few quick transfers do not hide a slow one.
            self.bytes_per_second = 1 / (_MEMORY / self.bytes_per_second + (1 - _MEMORY) / measured)


@dataclass(frozen=True, slots=True)
class TransferRates:
    """The two directions, of which device to host is commonly the slower one."""

    out: Rate
    """From the device to the tier."""
    back: Rate
    """From the tier to the device."""


def choose(
    rates: TransferRates, *, recompute_seconds: float, bytes_out: int, bytes_back: int
) -> Literal["swap", "recompute"]:
    """What a request that gives up its pages should do to have them again.

    Args:
        rates: as measured.
        recompute_seconds: to compute its tokens again.
        bytes_out: what has still to be written; 0 where it was written early, or for a request that was
            swapped before and asks whether to come back.
        bytes_back: what is to be read.
    """
    swap = rates.out.seconds(bytes_out) + rates.back.seconds(bytes_back)
    return "swap" if swap < recompute_seconds else "recompute"


def measure_rates(
    transfer: PageTransfer, page_bytes: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> TransferRates:
    """What moving pages takes, by moving page 0 of every group, which holds nothing, out and back.

    To be called while no step is under way. `page_bytes`: of each group; `clock`: in seconds.
    """

    def read() -> float:
        started = clock()
        for group in range(len(page_bytes)):
            transfer.read_pages(group, [0] * _NUM_PROBED).take()
        return clock() - started

    def write() -> None:
        for group, size in enumerate(page_bytes):
            transfer.write_pages(group, [0] * _NUM_PROBED, np.zeros((_NUM_PROBED, size), np.uint8))

    write()
    read()  # The first time also pays for memory that is used ever after.
    out = max(read(), _LEAST_SECONDS)
    started = clock()
    write()
    read()  # Only what is read tells that what was written before has arrived.
    back = max(clock() - started - out, _LEAST_SECONDS)
    num_bytes = _NUM_PROBED * sum(page_bytes)
    return TransferRates(Rate(num_bytes / out), Rate(num_bytes / back))
