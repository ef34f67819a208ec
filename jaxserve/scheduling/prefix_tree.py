"""The prefix cache: which pages of the pool hold which texts, for requests that begin alike.

Life of a page: a running request fills it; `insert` adds it to the tree, which takes a reference of its own;
the request ends and its cursor closes; the page lies idle until another request's `use` holds it again or
`evict` gives it back to the pool.

A running request holds, by its cursor, the node up to which its text is in the tree, and by that all nodes
above it. What nobody holds can be evicted, and is counted by `num_evictable` as the pages that `evict` would
free. For that count to be exact, nobody may keep references to the tree's pages without a cursor that holds
their node (the pages that a window has passed excepted).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxserve.scheduling.kv_events import CacheCleared, KvEvent, PagesRemoved, PagesStored
from jaxserve.scheduling.pages import PagePool
from jaxserve.scheduling.prefix_tree_eviction import RecomputeCost
from jaxserve.scheduling.prefix_tree_keys import (
    TOKEN_BYTES,
    CacheDomain,
    CacheScope,
    TokenIds,
    encode_tokens,
    event_hash,
)
from jaxserve.scheduling.prefix_tree_match import (
    PrefixMatch,
    PrefixQuery,
    first_page_read,
    num_unheld,
    search,
)
from jaxserve.scheduling.prefix_tree_nodes import Node, Root
from jaxserve.scheduling.prefix_tree_store import NodeStore


@dataclass(slots=True)
class PrefixStatistics:
    """Totals since the start."""

    query_tokens: int = 0
    """Tokens of the texts that were looked up and then started."""
    hit_tokens: int = 0
    """Of these, the tokens that were found computed."""
    saved_milliseconds: float = 0.0
    """What computing these would have cost; 0 without a cost function."""
    stored_pages: int = 0
    evicted_pages: int = 0
    """Pages of tokens that can no longer be found."""
    dropped_window_pages: int = 0
    """Pages that groups with a window gave up alone."""


class TreeCursor:
    """Where a request's text stands in the tree; it holds the way there until it is closed."""

    __slots__ = ("_page_size", "closed", "node", "root")

    def __init__(self, root: Root, node: Node, page_size: int) -> None:
        self.root = root
        self.node = node
        self._page_size = page_size
        self.closed = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the request that are in the tree, a whole number of pages: `insert` goes on from here."""
        return self.node.depth * self._page_size


class PrefixTree:
    """Full pages of text by domain and content. Not safe for use from several threads."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        windows: Sequence[int],
        *,
        recompute_cost: RecomputeCost | None = None,
        on_event: Callable[[Callable[[], KvEvent]], None] | None = None,
        on_page: Callable[[Root, Node], None] | None = None,
        copies_pages: bool = True,
    ) -> None:
        """Cache pages of `pool`.

        Args:
            pool: whose pages; the tree watches those of its groups with a window.
            page_size: tokens a page.
            windows: each group's sliding window in tokens, 0 for full attention.
            recompute_cost: milliseconds to compute tokens anew; without it all pages cost the same.
            on_event: given what makes the event of what has just been stored or removed; to be called at once
                or not at all.
            on_page: told of each new page and its root, such as `Offload.note_stored`.
            copies_pages: whether the device can copy a page, so that part of one can be used.

        Raises ValueError if the page size is below 1, or windows and groups differ in number.
        """
        if page_size < 1:
            raise ValueError(f"page_size {page_size} is out of range: it must be at least 1")
        if len(windows) != len(pool.num_pages):
            raise ValueError(f"{len(windows)} windows for a pool of {len(pool.num_pages)} cache groups")
        self.page_size = page_size
        self.windows = tuple(windows)
        self._statistics = PrefixStatistics()
        self._page_bytes = page_size * TOKEN_BYTES
        self._recompute_cost = recompute_cost
        self._on_event = on_event
        self._on_page = on_page
        self._copies_pages = copies_pages
        self._store = NodeStore(pool, page_size, windows, recompute_cost)

    # Looking up ------------------------------------------------------------------------------------------

    def match(self, query: PrefixQuery) -> PrefixMatch:
        """The longest cached prefix. Changes nothing but the query's memory; costs O(1) when repeated."""
        store = self._store
        root = store.root(query.domain)
        if root is None:
            return PrefixMatch(query, store.epoch, None, None, 0, ())
        return search(query, store.epoch, root, self.page_size, self.windows, begun=self._copies_pages)

    def num_claimed(self, match: PrefixMatch) -> tuple[int, ...]:
        """How many pages of each group, now counted as evictable, `use` of the match would hold."""
        path, num_full = match.query.path, match.num_full
        unheld = num_unheld(path, num_full)
        claimed: list[int] = []
        for group, window in enumerate(self.windows):
            if window:
                read = path[first_page_read(num_full, self.page_size, window) : num_full]
                claimed.append(sum(self._store.pool.held_once(group, node.pages[group]) for node in read))
            else:
                claimed.append(unheld)
        return tuple(claimed)

    def use(self, match: PrefixMatch, *, record: bool = True) -> TreeCursor:
        """Hold the match for a request that starts on it, whose page table then adopts `match.prefix`.

        Call it before evicting pages for the same request, which could take what was matched. An empty
        match gives a cursor at the start of the domain. The cursor must be closed once, when the table has
        been cleared. `record`: whether to count it in the statistics.

        Raises RuntimeError if the tree has given up a page since the match was made.
        """
        if match.epoch != self._store.epoch:
            raise RuntimeError("pages have been given up since the match was made: match again")
        root, node = match.root, match.node
        if root is None or node is None:
            cursor = self.open(match.query.domain)
        else:
            self._store.hold(node)
            self._store.touch_reach(node)
            cursor = TreeCursor(root, node, self.page_size)
        if record:
            self._record(match)
        return cursor

    def record_miss(self, query: PrefixQuery) -> None:
        """Count a text that was looked up in vain and then started."""
        self._statistics.query_tokens += query.num_tokens

    def open(self, domain: CacheDomain) -> TreeCursor:
        """A cursor at the start of a domain, for a request that does not read the cache."""
        root = self._store.grow_root(domain)
        self._store.hold(root)
        return TreeCursor(root, root, self.page_size)

    def fork(self, cursor: TreeCursor) -> TreeCursor:
        """Another cursor at the same place, for somebody who shares the same pages."""
        if cursor.closed:
            raise RuntimeError("a closed cursor cannot be forked")
        self._store.hold(cursor.node)
        return TreeCursor(cursor.root, cursor.node, self.page_size)

    def close(self, cursor: TreeCursor) -> None:
        """The request has let go of its pages; they can be found, and evicted, from now on."""
        if cursor.closed:
            raise RuntimeError("the cursor has been closed before")
        cursor.closed = True
        self._store.touch_reach(cursor.node)
        self._store.release_hold(cursor.node, cursor.root)
        self._report_removed()

    # Filling ---------------------------------------------------------------------------------------------

    def insert(
        self, cursor: TreeCursor, tokens: TokenIds, pages: Sequence[Sequence[int]]
    ) -> list[tuple[int, int, int]]:
        """Add full pages of a request after the cursor, and move it to their end. O(new pages).

        The pages must be written by a step that has been dispatched or is next to be; the tree takes a
        reference to each.

        Args:
            cursor: the request's.
            tokens: the token ids in the new pages; a whole number of pages, from `cursor.num_tokens` on.
            pages: for each group the request's pages from the start of its text, 0 where it has passed one.

        Returns:
            (group, index, page) for each page that the tree has already with the same tokens: the request
            may put it in place of its own (`PageTable.replace`), which so comes free.

        Raises ValueError if `tokens` are no whole number of pages.
        """
        text = encode_tokens(tokens)
        width, store = self._page_bytes, self._store
        if len(text) % width:
            raise ValueError(f"{len(tokens)} tokens are no whole number of pages of {self.page_size}")
        duplicates: list[tuple[int, int, int]] = []
        node, first_new = cursor.node, None
        for start in range(0, len(text), width):
            label = text[start : start + width]
            own = [column[node.depth] for column in pages]
            child = node.find(label)
            if child is None:
                child = store.add(node, label, own)
                first_new = first_new or child
                if self._on_page is not None:
                    self._on_page(cursor.root, child)
            else:
                duplicates += store.merge(child, own)
            store.move_hold(node, child)
            node = child
        cursor.node = node
        if self._on_event is not None and first_new is not None and not cursor.root.cleared:
            first, last = first_new, node
            self._on_event(lambda: self._stored(cursor.root, first, last))
        return duplicates

    def mark_end(self, cursor: TreeCursor) -> None:
        """The text up to the cursor is likely to be matched as it is: a prompt ends here.

        Groups with a window then keep longer what resuming from here reads.
        """
        self._store.touch_reach(cursor.node)

    # Giving back -----------------------------------------------------------------------------------------

    def num_evictable(self, group: int) -> int:
        """Pages of the group that `evict` can give up. O(1)."""
        return self._store.num_evictable(group)

    def evict(self, num_pages: Sequence[int]) -> tuple[int, ...]:
        """Give up at least so many pages of each group, or all that can be, those of least worth first.

        Returns how many were given up in each; they are free at once, except for those whose last user
        was in a step that is still in flight.
        """
        given_up = self._store.evict(num_pages)
        self._report_removed()
        return given_up

    def clear(self, scope: CacheScope | None = None) -> int:
        """Forget every text, or all of one scope; return how many pages of text could be found before.

        Pages that running requests hold stay theirs, and are given back when their cursors close.
        """
        for root in self._store.roots():
            if scope is None or root.domain.scope == scope:
                self._store.clear(root)
        num_removed = len(self._store.removed)
        if scope is None and self._on_event is not None:
            self._store.removed.clear()
            self._on_event(CacheCleared)
        self._report_removed()
        return num_removed

    # For observers ---------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages of text in the tree."""
        return self._store.num_nodes

    @property
    def statistics(self) -> PrefixStatistics:
        store = self._store
        return replace(
            self._statistics,
            stored_pages=store.num_stored,
            evicted_pages=store.num_evicted,
            dropped_window_pages=store.num_dropped,
        )

    def snapshot(self) -> list[PagesStored]:
        """Everything that can be matched, parents before children, for an observer who starts now."""
        return [self._stored(root, node, node) for root in self._store.roots() for node in root.below()]

    def holders(self) -> list[list[list[int]]]:
        """The tree as a holder of pages, as `PagePool.check_integrity` takes it."""
        columns: list[list[int]] = [[] for _ in self.windows]
        for node in self._store.nodes():
            for column, page in zip(columns, node.pages, strict=True):
                column.append(page)
        return [columns]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless holds, counts and the pool's references account for one another."""
        self._store.check_integrity()

    def _record(self, match: PrefixMatch) -> None:
        statistics = self._statistics
        statistics.query_tokens += match.query.num_tokens
        statistics.hit_tokens += match.num_tokens
        if self._recompute_cost is not None and match.num_tokens:
            statistics.saved_milliseconds += self._recompute_cost(0, match.num_tokens)

    def _stored(self, root: Root, first: Node, last: Node) -> PagesStored:
        """The event for the pages from one node down to another."""
        chain: list[Node] = []
        node: Node | None = last
        while node is not None and node.depth >= first.depth:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return PagesStored(
            root.domain,
            event_hash(node.key) if node is not None and node.depth else None,
            tuple(event_hash(page.key) for page in chain),
            b"".join(page.label for page in chain),
            self.page_size,
        )

    def _report_removed(self) -> None:
        removed = self._store.removed
        if removed:
            named = [node for node in removed if node.named]  # Nobody has heard of the others.
            if self._on_event is not None and named:
                self._on_event(lambda: PagesRemoved(tuple(event_hash(node.key) for node in named)))
            removed.clear()
