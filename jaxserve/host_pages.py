"""Pages that the KV pool has no room for, in the host's memory."""

from __future__ import annotations

from typing import Protocol, overload

from jaxserve.plan import EngineLimits
from jaxserve.scheduling.offload import Offload
from jaxserve.scheduling.offload_cost import measure_rates
from jaxserve.scheduling.offload_tier import HostMemoryTier, PageTransfer
from jaxserve.scheduling.page_swap import PageSwap


class PageEngine(PageTransfer, Protocol):
    """An engine whose pages can be moved."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Of a page of each cache group."""
        ...


@overload
def page_swap(engine: PageEngine, num_bytes: int) -> PageSwap: ...


@overload
def page_swap(engine: PageEngine, num_bytes: int | None) -> PageSwap | None: ...


def page_swap(engine: PageEngine, num_bytes: int | None) -> PageSwap | None:
    """Keep cached pages of an engine in so many bytes of the host's memory; None keeps none.

    Every cache group gets the same number of pages, and with that the same stretch of text. Transfers are
    measured, so no step may be under way. Raises ValueError if the bytes do not hold a page of each group.
    """
    if num_bytes is None:
        return None
    limits, page_bytes = engine.limits, engine.page_bytes
    num_slots = num_bytes // sum(page_bytes)
    if num_slots < 1:
        raise ValueError(
            f"host_kv_memory {num_bytes} holds no page: one of each cache group takes {sum(page_bytes)} bytes"
        )
    tiers = [HostMemoryTier(num_slots, size) for size in page_bytes]
    offload = Offload(tiers, engine, limits.page_size, limits.windows)
    return PageSwap(offload, measure_rates(engine, page_bytes))
