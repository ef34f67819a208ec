"""A prefix tree under requests that fill pages, for tests of the tree alone."""

from __future__ import annotations

from jaxserve.scheduling import PagePool, PageTable
from jaxserve.scheduling.kv_events import KvEvent
from jaxserve.scheduling.prefix_tree import PrefixTree, TreeCursor
from jaxserve.scheduling.prefix_tree_keys import CacheDomain, CacheScope
from jaxserve.scheduling.prefix_tree_match import PrefixMatch, PrefixQuery

PAGE = 4
DOMAIN = CacheDomain("model", "bf16", CacheScope("tenant", "a"))


class Engine:
    """A pool, a tree and requests that fill pages: what a scheduler would do, without steps."""

    def __init__(self, num_pages: tuple[int, ...] = (40,), windows: tuple[int, ...] = (0,), **kwargs: object):
        self.pool = PagePool(num_pages)
        self.windows = windows
        self.events: list[KvEvent] = []
        self.tree = PrefixTree(
            self.pool, PAGE, windows, on_event=lambda make: self.events.append(make()), **kwargs
        )  # type: ignore[arg-type]

    def match(self, tokens: list[int], limit: int | None = None, domain: CacheDomain = DOMAIN) -> PrefixMatch:
        return self.tree.match(PrefixQuery(domain, tokens, len(tokens) if limit is None else limit))

    def start(self, tokens: list[int], domain: CacheDomain = DOMAIN) -> tuple[PageTable, TreeCursor]:
        """A request that has computed all of `tokens`, on whatever was cached."""
        match = self.match(tokens, len(tokens) - 1, domain)
        cursor = self.tree.use(match)
        table = PageTable(self.pool, PAGE, self.windows)
        table.adopt(match.prefix(PAGE, self.windows))
        for end in range(table.num_spanned * PAGE, len(tokens) + PAGE, PAGE):
            num_tokens = min(end, len(tokens))
            table.pass_window(max(0, num_tokens - PAGE))
            table.grow(num_tokens)
            start, stop = cursor.num_tokens, num_tokens // PAGE * PAGE
            if stop > start:
                for group, index, page in self.tree.insert(cursor, tokens[start:stop], table.pages):
                    table.replace(group, index, page)
        return table, cursor

    def end(self, request: tuple[PageTable, TreeCursor]) -> None:
        table, cursor = request
        table.clear()
        self.tree.close(cursor)

    def serve(self, tokens: list[int], domain: CacheDomain = DOMAIN) -> None:
        self.end(self.start(tokens, domain))

    def check(self, *requests: tuple[PageTable, TreeCursor]) -> None:
        self.pool.check_integrity([*self.tree.holders(), *(table.pages for table, _ in requests)])
        self.tree.check_integrity()
