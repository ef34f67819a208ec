"""Pages of the KV pool as the host counts them: integers with reference counts, for each cache group.

Ownership: a page is in exactly one of three places.

    free list --acquire--> held (references >= 1) --last release--> free list, or, with a step in flight,
        ^                                                           the deferred queue
        +------------------ the latest step that may use it has retired ------------------+

Page 0 of every group is the device's sink for padding and is never in any of them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class PageWatcher(Protocol):
    """Learns when a page comes to have one holder only, and when it comes to have two."""

    def became_idle(self, page: int) -> None: ...

    def became_shared(self, page: int) -> None: ...


class PagePool:
    """Reference-counted pages of every cache group. Not safe for use from several threads."""

    def __init__(self, num_pages: Sequence[int]) -> None:
        """`num_pages`: the size of each group, its page 0 included."""
        if not num_pages or min(num_pages) < 2:
            raise ValueError(f"every cache group needs at least 2 pages, got {tuple(num_pages)}")
        self.num_pages = tuple(num_pages)
        self._references = [[0] * pages for pages in num_pages]
        self._num_uses = [[0] * pages for pages in num_pages]
        self._free = [list(range(pages - 1, 0, -1)) for pages in num_pages]
        self._deferred: deque[tuple[int, int, int]] = deque()
        self._last_use = [[0] * pages for pages in num_pages]
        """For each page the latest step that a holder which has let go may have used it in."""
        self._num_deferred = [0] * len(num_pages)
        self._watchers: list[PageWatcher | None] = [None] * len(num_pages)
        self._num_planned = 0
        self._num_retired = 0

    def num_free(self, group: int) -> int:
        """Pages that can be acquired now."""
        return len(self._free[group])

    @property
    def num_free_everywhere(self) -> int:
        """Pages that can be acquired now in each of the groups alike."""
        return min(map(len, self._free))

    @property
    def returning(self) -> bool:
        """Whether every group has a page that is free, or will be when the steps in flight have retired."""
        return all(
            free or num_deferred for free, num_deferred in zip(self._free, self._num_deferred, strict=True)
        )

    def acquire(self, group: int) -> int:
        """Take a free page, with one reference."""
        page = self._free[group].pop()
        assert self._references[group][page] == 0, f"page {page} of group {group} was free and held"
        self._references[group][page] = 1
        self._num_uses[group][page] += 1
        return page

    def retain(self, group: int, page: int) -> None:
        """Add a reference to a held page."""
        references = self._references[group]
        assert references[page] > 0, f"page {page} of group {group} is not held"
        references[page] += 1
        watcher = self._watchers[group]
        if watcher is not None and references[page] == 2:
            watcher.became_shared(page)

    def release(self, group: int, page: int) -> None:
        """Drop a reference; the last one frees the page, after the latest step in flight."""
        self._last_use[group][page] = self._num_planned
        self.release_unused(group, page)

    def release_unused(self, group: int, page: int) -> None:
        """Drop a reference of a holder for which no step in flight reads or writes the page."""
        references = self._references[group]
        assert references[page] > 0, f"page {page} of group {group} is not held"
        references[page] -= 1
        if references[page]:
            watcher = self._watchers[group]
            if watcher is not None and references[page] == 1:
                watcher.became_idle(page)
            return
        last_use = self._last_use[group][page]
        if last_use <= self._num_retired:
            self._free[group].append(page)
        else:
            insort(self._deferred, (last_use, group, page))
            self._num_deferred[group] += 1

    def num_references(self, group: int, page: int) -> int:
        """How many hold the page."""
        return self._references[group][page]

    def num_uses(self, group: int, page: int) -> int:
        """How many times the page has been taken from the free ones: its content is another each time."""
        return self._num_uses[group][page]

    def held_once(self, group: int, page: int) -> bool:
        """Whether one more release would free the page."""
        return self._references[group][page] == 1

    def watch(self, group: int, watcher: PageWatcher) -> None:
        """Have `watcher` told of the group's pages from now on, in place of whoever was told before."""
        self._watchers[group] = watcher

    def begin_step(self) -> None:
        """A step has been planned: pages released from now on may be in its use."""
        self._num_planned += 1

    def retire_step(self) -> None:
        """The oldest step in flight has retired: what was released while it was the latest is free."""
        assert self._num_retired < self._num_planned, "no step is in flight"
        self._num_retired += 1
        while self._deferred and self._deferred[0][0] <= self._num_retired:
            _, group, page = self._deferred.popleft()
            self._num_deferred[group] -= 1
            self._free[group].append(page)

    def check_integrity(self, holders: Iterable[Sequence[Sequence[int]]]) -> None:
        """Raise RuntimeError unless every page is in one place, with a reference for each of its holders.

        `holders`: for everything that holds pages, its page ids in each group; 0 stands for none.
        """
        held = [Counter[int]() for _ in self.num_pages]
        for pages_by_group in holders:
            for group, pages in enumerate(pages_by_group):
                held[group].update(page for page in pages if page)
        for group, pages in enumerate(self.num_pages):
            deferred = [page for _, g, page in self._deferred if g == group]
            idle = Counter(self._free[group] + deferred)
            for page in range(pages):
                references = self._references[group][page]
                if references != held[group][page] or idle[page] != (page > 0 and references == 0):
                    raise RuntimeError(
                        f"page {page} of group {group}: {references} references, {held[group][page]} "
                        f"holders, {idle[page]} times in the free list and the deferred queue"
                    )


NEVER = 2**31 - 1
"""A position that no token has."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What a request can start on: full pages to share, and perhaps a begun one to copy."""

    num_tokens: int
    """Computed tokens on them."""
    pages: tuple[tuple[int, ...], ...]
    """For each group the full pages at index 0 and up; 0 where the group's window has passed."""
    begun: tuple[int, ...] = ()
    """For each group the page with the tokens beyond the full ones, on which others may write still."""

    @property
    def num_full(self) -> int:
        """Pages of each group that are shared, the passed ones included."""
        return len(self.pages[0])

    @property
    def held(self) -> Iterator[tuple[int, int]]:
        """Every page of it, as (group, page)."""
        for group, pages in enumerate(self.pages):
            yield from ((group, page) for page in pages if page)
        yield from enumerate(self.begun)


class PageTable:
    """The pages of one request in every group: page `index` holds positions from `index * page_size` on."""

    __slots__ = ("_page_size", "_pool", "_windows", "num_passed", "num_spanned", "pages")

    def __init__(self, pool: PagePool, page_size: int, windows: Sequence[int]) -> None:
        """`windows`: each group's sliding window in tokens, 0 for full attention."""
        self._pool = pool
        self._page_size = page_size
        self._windows = windows
        self.pages: list[list[int]] = [[] for _ in windows]
        self.num_spanned = 0
        """Pages from index 0 to the last one held, the same in every group."""
        self.num_passed = [0] * len(windows)
        """Of these, the pages that each group no longer holds: they lie wholly behind its window."""

    def move_to(self, pool: PagePool) -> None:
        """Take pages from another pool from now on; only an empty table can."""
        assert self.num_spanned == 0, "pages lie in the pool that they were taken from"
        self._pool = pool

    def num_tokens_available(self, position: int) -> int:
        """Tokens from `position` on that the pages held and free pages can take."""
        return (self.num_spanned + self._pool.num_free_everywhere) * self._page_size - position

    def grow(self, num_tokens: int) -> list[tuple[int, int, int]]:
        """Acquire pages to hold `num_tokens` tokens; return the new ones as (group, index, page)."""
        grown: list[tuple[int, int, int]] = []
        while self.num_spanned * self._page_size < num_tokens:
            for group, pages in enumerate(self.pages):
                page = self._pool.acquire(group)
                pages.append(page)
                grown.append((group, self.num_spanned, page))
            self.num_spanned += 1
        return grown

    def take_computed(self, num_tokens: int) -> None:
        """Acquire the pages of so many tokens that the one after them reads, for content that is to come.

        Behind a group's window nothing is held. There must be enough free pages.
        """
        num_pages = -(-num_tokens // self._page_size)
        self.pass_window(num_tokens)
        for group, (window, pages) in enumerate(zip(self._windows, self.pages, strict=True)):
            first = window_start(num_tokens, window) // self._page_size if window else 0
            for index in range(self.num_spanned, num_pages):
                pages.append(self._pool.acquire(group) if index >= first else 0)
            self.num_passed[group] = max(self.num_passed[group], min(first, num_pages))
        self.num_spanned = max(self.num_spanned, num_pages)

    @property
    def next_pass(self) -> int:
        """The first position whose token needs `pass_window`; beyond any where no group has a window."""
        return min(
            (
                (passed + 1) * self._page_size + window - 1
                for window, passed in zip(self._windows, self.num_passed, strict=True)
                if window
            ),
            default=NEVER,
        )

    def pass_window(self, position: int) -> None:
        """Release the pages that lie wholly behind the windows of the token at `position`."""
        for group, window in enumerate(self._windows):
            if not window:
                continue
            first = window_start(position, window) // self._page_size
            pages = self.pages[group]
            for index in range(self.num_passed[group], min(first, self.num_spanned)):
                self._pool.release(group, pages[index])
                pages[index] = 0
                self.num_passed[group] = index + 1

    def share(self, num_tokens: int) -> SharedPrefix:
        """Add references to what a request that starts after the first `num_tokens` tokens would read.

        The pages must be held still, and written by a step that has been planned.
        """
        num_pages, num_begun = divmod(num_tokens, self._page_size)
        shared: list[tuple[int, ...]] = []
        for group, window in enumerate(self._windows):
            first = window_start(num_tokens, window) // self._page_size if window else 0
            assert self.num_passed[group] <= first, "the window has passed pages that were to be shared"
            live = self.pages[group][first:num_pages]
            shared.append((0,) * (num_pages - len(live)) + tuple(live))
        begun = tuple(pages[num_pages] for pages in self.pages) if num_begun else ()
        prefix = SharedPrefix(num_tokens, tuple(shared), begun)
        for group, page in prefix.held:
            self._pool.retain(group, page)
        return prefix

    def adopt(self, prefix: SharedPrefix) -> list[tuple[int, int, int]]:
        """Start this empty table on shared pages, with references of its own.

        In place of a begun page it takes a free one, which every group must have; returned are the copies
        to make, as (group, source, target).
        """
        assert self.num_spanned == 0, "only an empty table can adopt pages"
        for group, pages in enumerate(prefix.pages):
            self.pages[group] = list(pages)
            self.num_passed[group] = pages.count(0)
            for page in pages[self.num_passed[group] :]:
                self._pool.retain(group, page)
        self.num_spanned = prefix.num_full
        grown = self.grow(prefix.num_tokens)
        return [(group, prefix.begun[group], page) for group, _, page in grown]

    def replace(self, group: int, index: int, page: int) -> None:
        """Hold another page in place of one, with the same tokens computed in it."""
        self._pool.retain(group, page)
        self._pool.release(group, self.pages[group][index])
        self.pages[group][index] = page

    def clear(self) -> None:
        """Release every page."""
        for group, pages in enumerate(self.pages):
            for page in pages[self.num_passed[group] :]:
                self._pool.release(group, page)
            self.pages[group] = []
            self.num_passed[group] = 0
        self.num_spanned = 0


def window_start(position: int, window: int) -> int:
    """The first position that the token at `position` reads in a window that counts the token itself."""
    return max(0, position - window + 1)


def max_pages_spanned(num_tokens: int, page_size: int) -> int:
    """The most pages that so many consecutive tokens touch, wherever they start."""
    return 1 if num_tokens < 2 else (num_tokens - 2) // page_size + 2
