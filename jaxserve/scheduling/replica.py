"""What each replica of the engine has by itself: pages, and whoever keeps count of them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.plan import EngineLimits
from jaxserve.scheduling.pages import PagePool
from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.room import Room
from jaxserve.scheduling.running_pages import RunningPages
from jaxserve.scheduling.shared_prompts import SharedPrompts
from jaxserve.scheduling.slots import SlotTable


@dataclass(frozen=True, slots=True)
class Replica:
    """Page ids are those of its pool, and mean nothing in another."""

    number: int
    pool: PagePool
    cache: PrefixCache | None
    prompts: SharedPrompts
    pages: RunningPages
    room: Room

    @classmethod
    def of(
        cls,
        number: int,
        pool: PagePool,
        cache: PrefixCache | None,
        *,
        limits: EngineLimits,
        max_chunk: int,
        table: SlotTable,
        queue: RequestQueue,
    ) -> Replica:
        """The replica of a number; `table` and `queue` are those of all."""
        prompts = SharedPrompts(pool, limits, cache)
        pages = RunningPages(pool, limits, table, queue, prompts, cache, number)
        room = Room(limits, max_chunk, pool, table, prompts, cache, queue, number)
        return cls(number, pool, cache, prompts, pages, room)

    @property
    def num_free_pages(self) -> tuple[int, ...]:
        """Pages of each cache group that no request holds and no step in flight may still use."""
        groups = range(len(self.pool.num_pages))
        evictable = [0 if self.cache is None else self.cache.num_evictable(group) for group in groups]
        return tuple(self.pool.num_free(group) + evictable[group] for group in groups)

    def check_integrity(self, running: list[Request]) -> None:
        """Raise RuntimeError unless pages and those that hold them, among them `running`, account for one
        another."""
        holders = [request.table.pages for request in running]
        holders += self.prompts.holders()
        if self.cache is not None:
            self.cache.check_integrity(len(running))
            holders += self.cache.holders()
        self.pool.check_integrity(holders)


def slots_of_replicas(limits: EngineLimits) -> list[range]:
    """The slots of each that requests are given: everyone has a row in every step, also beside a chunk."""
    stride, largest = limits.num_slots // limits.num_replicas, limits.chunk_shapes[-1]
    num_used = min(stride, largest.rows, largest.sequences, largest.logit_rows)
    return [range(first, first + num_used) for first in range(0, limits.num_slots, stride)]
