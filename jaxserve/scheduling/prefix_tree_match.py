"""Looking up what of a text is cached: the question, the answer, and the search."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.scheduling.pages import SharedPrefix, window_start
from jaxserve.scheduling.prefix_tree_keys import TOKEN_BYTES, CacheDomain, TokenIds, encode_tokens
from jaxserve.scheduling.prefix_tree_nodes import Node, Root


class PrefixQuery:
    """A text to look up, as often as need be: each look-up goes on from where the last one came to."""

    __slots__ = ("domain", "keys", "limit", "num_tokens", "path", "root", "text")

    def __init__(self, domain: CacheDomain, tokens: TokenIds, limit: int) -> None:
        """Ask for the longest cached prefix of `tokens`, of at most `limit` tokens.

        `limit` is at most `len(tokens) - 1` where the last token is to be computed for its logits.
        Raises ValueError if it is below 0 or above the number of tokens.
        """
        if not 0 <= limit <= len(tokens):
            raise ValueError(f"limit {limit} is out of range: the text has {len(tokens)} tokens")
        self.domain = domain
        self.num_tokens = len(tokens)
        self.limit = limit
        self.text = encode_tokens(tokens)
        self.keys: dict[int, bytes] = {}
        """By their index, the keys of those full pages that were looked for outside the tree."""
        self.root: Root | None = None
        """The root that `path` starts below."""
        self.path: list[Node] = []
        """The nodes found by the last look-up, of which some may have been removed since, from the end."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixMatch:
    """What is cached of a text, until the tree next gives up a page."""

    query: PrefixQuery
    epoch: int
    """Of the tree when it was asked."""
    root: Root | None
    node: Node | None
    """The last full page; None if there is none."""
    num_tokens: int
    """Tokens of the full pages and of the begun one."""
    begun: tuple[int, ...]
    """For each group the page whose first tokens are those beyond the full pages, to be copied before the
    rest of it is overwritten; empty if there is none."""

    @property
    def num_full(self) -> int:
        """Full pages of each group."""
        return 0 if self.node is None else self.node.depth

    def prefix(self, page_size: int, windows: Sequence[int]) -> SharedPrefix:
        """The pages as a page table adopts them."""
        num_full = self.num_full
        columns: list[list[int]] = [[] for _ in windows]
        node = self.node
        while node is not None and node.depth:
            for column, page in zip(columns, node.pages, strict=True):
                column.append(page)
            node = node.parent
        pages: list[tuple[int, ...]] = []
        for column, window in zip(columns, windows, strict=True):
            column.reverse()
            first = first_page_read(num_full, page_size, window)
            pages.append((0,) * first + tuple(column[first:]))
        return SharedPrefix(self.num_tokens, tuple(pages), self.begun)


def first_page_read(num_pages: int, page_size: int, window: int) -> int:
    """The first page that the token after `num_pages` full pages reads; 0 without a window."""
    return window_start(num_pages * page_size, window) // page_size if window else 0


def search(
    query: PrefixQuery, epoch: int, root: Root, page_size: int, windows: Sequence[int], *, begun: bool
) -> PrefixMatch:
    """The longest usable prefix below the root; with part of a page at its end if `begun`."""
    _descend(query, root, page_size)
    path = query.path
    num_full = _usable(path, page_size, windows)
    node = path[num_full - 1] if num_full else None
    num_tokens = num_full * page_size
    source: tuple[int, ...] = ()
    if begun and num_full == len(path) and query.limit > num_tokens:
        rest = query.text[num_tokens * TOKEN_BYTES : min(query.limit, num_tokens + page_size) * TOKEN_BYTES]
        alike = (node or root).most_alike(rest)
        if alike is not None and all(alike[0].pages):
            source = tuple(alike[0].pages)
            num_tokens += alike[1]
    return PrefixMatch(query, epoch, root, node, num_tokens, source)


def num_unheld(path: Sequence[Node], num_pages: int) -> int:
    """How many of the first nodes of a path nobody holds: the last ones of them."""
    return num_pages - bisect_left(path, True, 0, num_pages, key=lambda node: node.holds == 0)


def _descend(query: PrefixQuery, root: Root, page_size: int) -> None:
    """Bring the query's path up to date."""
    path, text = query.path, query.text
    if query.root is not root:
        path.clear()
        query.root = root
    while path and path[-1].parent is None:
        path.pop()
    width = page_size * TOKEN_BYTES
    node: Node | None = path[-1] if path else root
    for start in range(len(path) * width, query.limit // page_size * width, width):
        node = node.find(text[start : start + width])
        if node is None:
            return
        path.append(node)


def _usable(path: Sequence[Node], page_size: int, windows: Sequence[int]) -> int:
    """The most pages of the path after which every group still has what the next token's window reads."""
    num_pages, settled = len(path), -1
    while settled != num_pages:
        settled = num_pages
        for group, window in enumerate(windows):
            if window:
                num_pages = _usable_in_group(path, num_pages, group, page_size, window)
    return num_pages


def _usable_in_group(path: Sequence[Node], num_pages: int, group: int, page_size: int, window: int) -> int:
    index = num_pages - 1
    while index >= first_page_read(num_pages, page_size, window):
        if not path[index].pages[group]:
            num_pages = index  # Any longer prefix that is left would have this page in its window too.
        index -= 1
    return num_pages
