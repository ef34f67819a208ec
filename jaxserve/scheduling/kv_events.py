"""What a router must hear to know which prefixes this engine has cached, kept for readers on other threads.

The loop's thread adds events and closes a batch once a step; readers on any thread ask for what follows the
last batch that they have seen. The log is bounded: a reader that falls behind is told how much it missed.
Before the first reader comes nothing is written, which would cost every page a digest; what happened until
then counts as one batch that everybody has missed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from jaxserve.scheduling.prefix_tree_keys import CacheDomain, decode_tokens


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages of one text can be matched from now on."""

    domain: CacheDomain
    parent_hash: int | None
    """The hash of the page before the first; None at the start of a text."""
    hashes: tuple[int, ...]
    """Each page's hash, which stands for the whole text up to the page's end."""
    tokens: bytes
    """The pages' token ids one after another, as little-endian int32."""
    page_size: int

    @property
    def token_ids(self) -> list[list[int]]:
        """The token ids of each page."""
        ids = decode_tokens(self.tokens)
        return [ids[start : start + self.page_size] for start in range(0, len(ids), self.page_size)]


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """These pages can no longer be matched."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No page can be matched any more."""


KvEvent = PagesStored | PagesRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """What one step changed."""

    sequence_number: int
    """1 for the first batch, then rising by one."""
    timestamp: float
    """Seconds since the epoch."""
    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All that can be matched after a batch."""

    sequence_number: int
    """Of that batch; 0 before the first. The next one goes on from here."""
    events: tuple[PagesStored, ...]
    """Parents before children."""


@dataclass(frozen=True, slots=True)
class KvEventPage:
    """An answer to a reader."""

    batches: tuple[KvEventBatch, ...]
    num_missed: int
    """Batches that were asked for and are no longer kept; the reader's picture is incomplete if any."""


class KvEventLog:
    """A bounded log of batches. `add` and `flush` belong to one thread; everything else to any."""

    def __init__(self, max_batches: int = 10_000, clock: Callable[[], float] = time.time) -> None:
        """Raises ValueError if `max_batches` is below 1."""
        if max_batches < 1:
            raise ValueError(f"max_batches {max_batches} is out of range: it must be at least 1")
        self._clock = clock
        self._wanted = False
        self._skipped = False
        """Whether something happened that nobody wanted to know."""
        self._pending: list[KvEvent] = []
        self._batches: deque[KvEventBatch] = deque(maxlen=max_batches)
        self._lock = threading.Lock()
        self._last = 0
        self._listeners: list[Callable[[], None]] = []

    def add(self, make_event: Callable[[], KvEvent]) -> None:
        """Note an event for the batch that the next `flush` closes; it is made only if somebody reads."""
        if self._wanted:
            self._pending.append(make_event())
        else:
            self._skipped = True

    def flush(self) -> None:
        """Publish what was added since the last call as one batch, if anything was, and tell listeners."""
        if self._skipped and self._wanted:
            with self._lock:
                self._count_skipped()
        if not self._pending:
            return
        with self._lock:
            self._last += 1
            self._batches.append(KvEventBatch(self._last, self._clock(), tuple(self._pending)))
            listeners = tuple(self._listeners)
        self._pending.clear()
        for listener in listeners:
            listener()

    @property
    def last_sequence_number(self) -> int:
        """The number of the latest batch; 0 before the first."""
        with self._lock:
            self._want()
            return self._last

    def read(self, start: int, max_batches: int = 1_000) -> KvEventPage:
        """The kept batches from sequence number `start` on, oldest first; at once, also if there are none.

        Raises ValueError for a `start` below 1.
        """
        if start < 1:
            raise ValueError(f"start {start} is out of range: sequence numbers begin at 1")
        with self._lock:
            self._want()
            first_kept = self._last - len(self._batches) + 1
            begin = max(start, first_kept) - first_kept
            batches = tuple(islice(self._batches, begin, begin + max_batches))
        return KvEventPage(batches, max(0, first_kept - start))

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Have `listener` called after every flush, on the flushing thread; returns what ends that.

        It must return at once and not raise: typically it wakes the reader's own thread or event loop.
        """
        with self._lock:
            self._want()
            self._listeners.append(listener)

        def unlisten() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unlisten

    def _want(self) -> None:
        """Somebody asks."""
        if not self._wanted:
            self._wanted = True
            self._count_skipped()

    def _count_skipped(self) -> None:
        if self._skipped:
            self._skipped = False
            self._last += 1
            self._batches.clear()
