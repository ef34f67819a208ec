"""The prefix caches of all replicas, as those see them who ask about the engine as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields

from jaxserve.plan import EngineLimits
from jaxserve.scheduling.kv_events import KvEvent, KvEventLog, KvSnapshot, PagesRemoved, PagesStored
from jaxserve.scheduling.page_swap import PageSwap
from jaxserve.scheduling.pages import PagePool
from jaxserve.scheduling.prefix_cache import CacheIdentity, PrefixCache
from jaxserve.scheduling.prefix_tree import PrefixStatistics
from jaxserve.scheduling.prefix_tree_keys import CacheScope
from jaxserve.scheduling.request import Request


class PrefixCaches:
    """One cache for each replica, whose pages nobody else can start on, and one log of what they hold."""

    def __init__(
        self,
        identity: CacheIdentity,
        pools: Sequence[PagePool],
        limits: EngineLimits,
        token_seconds: Callable[[], float],
        swap: PageSwap | None = None,
    ) -> None:
        """`pools`: of the replicas; the others as of `PrefixCache`."""
        self.events = KvEventLog()
        tell = self.events.add if len(pools) == 1 else _JointEvents(self.events).add
        self.caches = tuple(PrefixCache(identity, pool, limits, token_seconds, tell, swap) for pool in pools)

    @property
    def statistics(self) -> PrefixStatistics:
        """Of all together."""
        each = [cache.statistics for cache in self.caches]
        return PrefixStatistics(
            *(sum(getattr(one, field.name) for one in each) for field in fields(PrefixStatistics))
        )

    def num_cached(self, request: Request) -> int:
        """Tokens of a waiting request that it could start on now, where there are most."""
        return max(cache.num_cached(request) for cache in self.caches)

    def forget(self, request: Request) -> None:
        """A waiting request will not start, or has started."""
        for cache in self.caches:
            cache.forget(request)

    def clear(self, scope: CacheScope | None = None) -> int:
        """Forget everything, or what one tenant or namespace shares; return how many pages that was.

        What running requests hold stays theirs until they end. The events of it are published at once.
        """
        num_pages = sum(cache.clear(scope) for cache in self.caches)
        self.events.flush()
        return num_pages

    def snapshot(self) -> KvSnapshot:
        """All that can be matched now, for a reader of events who cannot go on where it was."""
        self.events.flush()
        stored = [event for cache in self.caches for event in cache.snapshot()]
        return KvSnapshot(self.events.last_sequence_number, tuple(stored))


class _JointEvents:
    """Tells a log what several caches tell: a page that two hold is gone only when neither has it any more.

    It is told as stored by each. All events are made, wanted or not, as they are counted.
    """

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._num_holders: Counter[int] = Counter()

    def add(self, make_event: Callable[[], KvEvent]) -> None:
        event = make_event()
        if isinstance(event, PagesStored):
            self._num_holders.update(event.hashes)
        elif isinstance(event, PagesRemoved):
            event = PagesRemoved(tuple(page for page in event.hashes if self._is_gone(page)))
            if not event.hashes:
                return
        else:
            self._num_holders.clear()
        self._log.add(lambda: event)

    def _is_gone(self, page: int) -> bool:
        self._num_holders[page] -= 1
        if self._num_holders[page] > 0:
            return False
        del self._num_holders[page]
        return True
