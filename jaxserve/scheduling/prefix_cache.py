"""Prefix reuse as the scheduler sees it: which requests stand where in the tree of cached pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.plan import EngineLimits, IntArray
from jaxserve.scheduling.kv_events import KvEvent, PagesStored
from jaxserve.scheduling.offload import OffloadMatch
from jaxserve.scheduling.page_swap import PageSwap
from jaxserve.scheduling.pages import PagePool, SharedPrefix
from jaxserve.scheduling.prefix_tree import PrefixStatistics, PrefixTree, TreeCursor
from jaxserve.scheduling.prefix_tree_keys import CacheDomain, CacheScope
from jaxserve.scheduling.prefix_tree_match import PrefixMatch, PrefixQuery
from jaxserve.scheduling.request import Request, Submission
from jaxserve.scheduling.slots import SlotTable

_PAGES_AT_ONCE = 8
"""Full pages of an answer that are added together while it runs, as that costs each one less; nobody has much
use for them before it ends."""


@dataclass(frozen=True, kw_only=True)
class CacheIdentity:
    """What the keys and values of an engine depend on, beside the tokens."""

    model: str
    """A fingerprint of the weights and of what computes with them."""
    kv_format: str
    attention_share: float = 0.0
    """What it costs to attend to one more token, as a part of computing a token that attends to none."""


class PrefixCache:
    """Finds what is cached of a request's text, holds it while the request runs, adds what it computes."""

    def __init__(
        self,
        identity: CacheIdentity,
        pool: PagePool,
        limits: EngineLimits,
        token_seconds: Callable[[], float],
        on_event: Callable[[Callable[[], KvEvent]], None],
        swap: PageSwap | None = None,
    ) -> None:
        """`token_seconds`: what a prompt token costs at present, without attention. `on_event`: as of
        `PrefixTree`. `swap`: keeps pages beyond the pool."""
        self._identity = identity
        self._pool = pool
        self._page_size = limits.page_size
        self._windows = limits.windows
        self._token_seconds = token_seconds
        self._swap = swap
        self._tree = PrefixTree(
            pool,
            limits.page_size,
            limits.windows,
            recompute_cost=self._cost,
            on_event=on_event,
            on_page=None if swap is None else swap.offload.note_stored,
            copies_pages=limits.copies_pages,
        )
        self._queries: dict[Request, PrefixQuery] = {}
        self._cursors: dict[Request, TreeCursor] = {}
        self._shared: dict[Submission, TreeCursor] = {}

    @property
    def statistics(self) -> PrefixStatistics:
        return self._tree.statistics

    def num_evictable(self, group: int) -> int:
        """Pages of a group that can be had by forgetting."""
        return self._tree.num_evictable(group)

    def match(self, request: Request) -> PrefixMatch | None:
        """What a waiting request could start on now; None if it may not read, or nothing is cached."""
        match = self._match(request)
        return match if match is not None and match.num_tokens else None

    def match_full(self, request: Request) -> PrefixMatch | None:
        """The same, as far as full pages go."""
        match = self._match(request)
        if match is None or not match.num_full:
            return None
        return replace(match, num_tokens=match.num_full * self._page_size, begun=())

    def match_beyond(self, request: Request) -> tuple[PrefixMatch, OffloadMatch] | None:
        """What a waiting request could start on after pages have been brought back, and these; None if
        there are none worth it. What they go on from can be empty."""
        match = None if self._swap is None else self._match(request)
        if self._swap is None or match is None:
            return None
        start, page_size = match.num_full * self._page_size, self._page_size
        more = self._swap.find(match, lambda num_pages: self._cost(start, num_pages * page_size) / 1000.0)
        # Part of a page in the pool is worth less than the whole one that is kept.
        return None if more is None else (replace(match, num_tokens=start, begun=()), more)

    def restore(self, request: Request, more: OffloadMatch) -> int:
        """Bring back pages for a request that has started on what is before them; return their tokens."""
        assert self._swap is not None, "there is nowhere to bring pages back from"
        return self._swap.restore(more, request.table) * self._page_size

    def save(self, request: Request) -> None:
        """A running request, all of whose pages are stored, is to give them up and to go on later."""
        cursor = self._cursors.get(request)
        if self._swap is not None and cursor is not None and request.submission.terms.cache_read:
            self._swap.save(cursor, self._cost(0, cursor.num_tokens) / 1000.0)

    def _match(self, request: Request) -> PrefixMatch | None:
        """What is in the tree, which can be nothing; None if the request may not read."""
        terms = request.submission.terms
        if not terms.cache_read or request.scores_prompt:
            return None
        query = self._queries.get(request)
        if query is None or query.num_tokens != request.num_known:
            tokens = request.submission.prompt + request.output
            query = PrefixQuery(self._domain(request), tokens, len(tokens) - 1)
            self._queries[request] = query
        return self._tree.match(query)

    def num_cached(self, request: Request) -> int:
        """Tokens of a waiting request that it could start on now."""
        match = self.match(request)
        return 0 if match is None else match.num_tokens

    def num_claimed(self, match: PrefixMatch) -> tuple[int, ...]:
        """Pages of each group that are evictable until the match is put to use."""
        return self._tree.num_claimed(match)

    def prefix(self, match: PrefixMatch) -> SharedPrefix:
        return match.prefix(self._page_size, self._windows)

    def free(self, num_pages: Sequence[int], keep: PrefixMatch | None = None) -> bool:
        """Have so many pages free in each group, as far as forgetting helps; the full pages of `keep` stay.

        Returns whether anything was forgotten.
        """
        missing = [max(0, num - self._pool.num_free(group)) for group, num in enumerate(num_pages)]
        if not any(missing):
            return False
        hold = None if keep is None else self._tree.use(keep, record=False)
        forgotten = any(self._tree.evict(missing))
        if hold is not None:
            self._tree.close(hold)
        return forgotten

    def start(self, request: Request, match: PrefixMatch | None) -> None:
        """A request starts on what was matched, which it holds from now on."""
        query = self._queries.pop(request, None)
        if match is None and query is not None:
            self._tree.record_miss(query)
        if match is not None:
            self._cursors[request] = self._tree.use(match)
        elif request.submission.terms.cache_write:
            self._cursors[request] = self._tree.open(self._domain(request))

    def store(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a running request are known, and computed by a planned step."""
        cursor = self._cursors.get(request)
        if cursor is None or not request.submission.terms.cache_write:
            return
        start, end = cursor.num_tokens, num_tokens // self._page_size * self._page_size
        if end <= start:
            return
        prompt = request.submission.prompt
        num_prompt = len(prompt)
        tokens = prompt[start:end] if start < num_prompt else []
        if end > num_prompt:
            tokens = tokens + request.output[max(0, start - num_prompt) : end - num_prompt]
        self._tree.insert(cursor, tokens, request.table.pages)

    def store_full(self, table: SlotTable, slots: IntArray) -> None:
        """Add the pages of those requests in the slots that have filled several, computed and known."""
        # The last token that has arrived may be one that ends its answer, and never be computed.
        known = table.num_arrived(slots) - 1
        num_full = np.minimum(known, table.computed[slots]) // self._page_size
        due = (num_full >= table.num_stored[slots] + _PAGES_AT_ONCE) & (table.serial[slots] >= 0)
        if not due.any():
            return
        for slot, num_pages in zip(slots[due].tolist(), num_full[due].tolist(), strict=True):
            table.num_stored[slot] = num_pages
            self.store(table.at(slot), num_pages * self._page_size)

    def store_rest(self, table: SlotTable, request: Request) -> None:
        """A running request is to let go of pages: add those that have not been added yet."""
        num_known = len(request.submission.prompt) + len(request.output) - 1
        self.store(request, min(num_known, int(table.computed[request.slot])))

    def end(self, request: Request) -> None:
        """A running request has let go of its pages."""
        cursor = self._cursors.pop(request, None)
        if cursor is None:
            return
        shared = self._shared.get(request.submission)
        if shared is not None and request is request.submission.leader:
            # The page on which its prompt ends is held for the others, and may since be full and stored.
            self._shared[request.submission] = self._tree.fork(cursor)
            self._tree.close(shared)
        self._tree.close(cursor)

    def forget(self, request: Request) -> None:
        """A waiting request will not start."""
        self._queries.pop(request, None)

    def share(self, leader: Request) -> None:
        """The prompt that a first sample has computed is held for the others."""
        cursor = self._cursors.get(leader)
        if cursor is not None:
            self._tree.mark_end(cursor)
            self._shared[leader.submission] = self._tree.fork(cursor)

    def start_shared(self, request: Request) -> None:
        """Another sample starts on its prompt's pages."""
        cursor = self._shared.get(request.submission)
        if cursor is not None:
            self._cursors[request] = self._tree.fork(cursor)

    def end_shared(self, submission: Submission) -> None:
        """A prompt is held for its samples no longer."""
        cursor = self._shared.pop(submission, None)
        if cursor is not None:
            self._tree.close(cursor)

    def clear(self, scope: CacheScope | None = None) -> int:
        """Forget everything, or what one tenant or namespace shares; return how many pages that was.

        What running requests hold stays theirs until they end.
        """
        num_pages = self._tree.clear(scope)
        if self._swap is not None:
            self._swap.offload.clear(scope)
        return num_pages

    def snapshot(self) -> list[PagesStored]:
        """All that can be matched now, parents before children."""
        return self._tree.snapshot()

    def holders(self) -> list[list[list[int]]]:
        """The pages held, as `PagePool.check_integrity` takes them."""
        return self._tree.holders()

    def check_integrity(self, num_running: int) -> None:
        """Raise RuntimeError unless the tree accounts for itself, and only the running hold places in it."""
        self._tree.check_integrity()
        if len(self._cursors) > num_running:
            raise RuntimeError(f"{len(self._cursors)} cursors for {num_running} running requests")

    def _domain(self, request: Request) -> CacheDomain:
        scope = CacheScope.of(request.submission.terms)
        return CacheDomain(self._identity.model, self._identity.kv_format, scope)

    def _cost(self, start: int, num_tokens: int) -> float:
        """Milliseconds to compute so many tokens from a position on."""
        attended = start + num_tokens / 2
        scale = 1000.0 * self._token_seconds()
        return scale * num_tokens * (1.0 + self._identity.attention_share * attended)
