"""Pages beyond the pool: what the prefix tree gives up is kept in a slower tier, and found there again.

Writing is the slow direction, so pages are written early, while there is nothing better to do
(`write_early`), and evicting a page costs nothing. A request that gives up its pages is swapped by the same
means: its full pages are in the tree, `save` writes those that have not been written, and when it starts
again it finds them in the tree or here like any prefix. What is not a full page is computed again.

A page that cannot be read, or comes back other than it was written, is a miss: the text before it is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.scheduling.offload_index import PageName, StoredPage, TierIndex
from jaxserve.scheduling.offload_tier import Bytes, PageRead, PageTier, PageTransfer, TierRead
from jaxserve.scheduling.prefix_tree import TreeCursor
from jaxserve.scheduling.prefix_tree_keys import TOKEN_BYTES, CacheScope, page_key
from jaxserve.scheduling.prefix_tree_match import PrefixMatch, first_page_read
from jaxserve.scheduling.prefix_tree_nodes import Node, Root


@dataclass(frozen=True, slots=True, eq=False)
class OffloadMatch:
    """Full pages of a text that a tier holds, next after those that the tree holds."""

    first_page: int
    """The index of the first of them in the text."""
    columns: tuple[tuple[StoredPage | None, ...], ...]
    """For each group its pages; None where the group's window will have passed."""
    num_bytes: int

    @property
    def num_pages(self) -> int:
        return len(self.columns[0])


@dataclass(slots=True, eq=False)
class Restoration:
    """Pages on their way back from the tiers."""

    match: OffloadMatch
    reads: list[tuple[list[int], TierRead]]
    """For each group the indices, within the match, of the pages being read."""

    @property
    def ready(self) -> bool:
        """Whether `Offload.restore` does not have to wait."""
        return all(read.ready for _, read in self.reads)


@dataclass(slots=True, eq=False)
class _Writing:
    """Pages of one group on their way out of the pool."""

    group: int
    names: list[PageName]
    read: PageRead


class Offload:
    """Moves pages between the pool and a tier for each group. Not safe for use from several threads."""

    def __init__(
        self, tiers: Sequence[PageTier], transfer: PageTransfer, page_size: int, windows: Sequence[int]
    ) -> None:
        """`tiers`: one for each cache group. Raises ValueError if tiers and windows differ in number."""
        if len(tiers) != len(windows):
            raise ValueError(f"{len(tiers)} tiers for {len(windows)} cache groups")
        self.indices = [TierIndex(tier) for tier in tiers]
        self._transfer = transfer
        self.page_size = page_size
        """In tokens."""
        self._windows = tuple(windows)
        self._unwritten: deque[tuple[Root, Node]] = deque()
        self._writing: deque[_Writing] = deque()

    # Out -------------------------------------------------------------------------------------------------

    def note_stored(self, root: Root, node: Node) -> None:
        """The tree has a new page: write it when there is time (`PrefixTree`'s `on_page`)."""
        self._unwritten.append((root, node))

    @property
    def num_unwritten(self) -> int:
        """Pages of text, at most, that `write_early` has yet to look at."""
        return len(self._unwritten)

    @property
    def num_writing(self) -> int:
        """Pages on their way out."""
        return sum(len(writing.names) for writing in self._writing)

    def write_early(self, max_pages: int) -> int:
        """Start to write up to so many pages of text, the oldest first, which will be evicted first.

        To be called while the device has nothing better to do, after the steps that fill the pages have
        been dispatched. Returns the pages started.
        """
        lacking: list[tuple[PageName, Node]] = []
        while self._unwritten and len(lacking) < max_pages:
            root, node = self._unwritten.popleft()
            if node.parent is not None and not root.cleared:
                name = _name(root, node)
                if self._lacks(name, node):
                    lacking.append((name, node))
        self._start_writing(lacking)
        return len(lacking)

    def save(self, cursor: TreeCursor, max_pages: int | None = None) -> int:
        """Start to write what is not written of a request's pages in the tree, which it is to give up.

        To be called before its pages are released. The first `max_pages` of text are written, by default
        all. Returns the pages of text started.
        """
        lacking = self._unsaved(cursor)[:max_pages]
        self._start_writing(lacking)
        return len(lacking)

    def bytes_to_save(self, cursor: TreeCursor) -> int:
        """Bytes that `save` would write, for `choose`."""
        return sum(
            index.tier.page_bytes
            for _, node in self._unsaved(cursor)
            for index, page in zip(self.indices, node.pages, strict=True)
            if page
        )

    def num_bytes(self, cursor: TreeCursor) -> int:
        """Bytes that a request's pages in the tree will be to bring back, for `choose`."""
        num_pages = cursor.num_tokens // self.page_size
        return sum(
            index.tier.page_bytes * (num_pages - first_page_read(num_pages, self.page_size, window))
            for index, window in zip(self.indices, self._windows, strict=True)
        )

    def abandon(self) -> None:
        """The device is lost: nothing that is under way will arrive, and nothing more can be written."""
        self._writing.clear()
        self._unwritten.clear()

    def collect(self, *, wait: bool = False) -> None:
        """Put what has arrived from the device into the tiers; `wait` for all that is under way."""
        while self._writing and (wait or self._writing[0].read.ready):
            writing = self._writing.popleft()
            for name, data in zip(writing.names, writing.read.take(), strict=True):
                self.indices[writing.group].put(name, data)

    def clear(self, scope: CacheScope | None = None) -> None:
        """Forget everything, or all of one scope, and what is under way: the twin of `PrefixTree.clear`."""
        self._writing.clear()
        for index in self.indices:
            index.clear(scope)

    # Back ------------------------------------------------------------------------------------------------

    def match(self, found: PrefixMatch) -> OffloadMatch:
        """The most full pages of the query's text that the tiers hold after those in the tree."""
        names = self._names_after(found)
        columns = [[index.find(name) for name in names] for index in self.indices]
        num_pages = self._usable(columns, found.num_full)
        kept = [column[:num_pages] for column in columns]
        for column, window in zip(kept, self._windows, strict=True):
            passed = first_page_read(found.num_full + num_pages, self.page_size, window) - found.num_full
            column[: max(0, passed)] = [None] * max(0, passed)
        num_bytes = sum(
            index.tier.page_bytes * sum(page is not None for page in column)
            for index, column in zip(self.indices, kept, strict=True)
        )
        return OffloadMatch(found.num_full, tuple(map(tuple, kept)), num_bytes)

    def begin(self, match: OffloadMatch) -> Restoration:
        """Start to read the pages from their tiers; poll `ready`, or be content to compute them instead.

        What the tree holds before them must stay until `restore`: put its match to use first.
        """
        reads: list[tuple[list[int], TierRead]] = []
        for index, column in zip(self.indices, match.columns, strict=True):
            wanted = [number for number, page in enumerate(column) if page is not None]
            slots = [page.slot for page in column if page is not None]
            try:
                read = index.tier.read(slots)
            except OSError:
                read = _Unreadable(len(slots))
            reads.append((wanted, read))
        return Restoration(match, reads)

    def restore(self, restoration: Restoration, grow: Callable[[int], Sequence[Sequence[int]]]) -> int:
        """Fill pages of the pool with what came back; return how many pages of text are as they were.

        Args:
            restoration: from `begin`.
            grow: has the request's table take so many pages of text after those before the match, of
                which groups with a window need only those that the next token reads; returns for each
                group the request's pages from the start of its text.

        The text up to `match.first_page` and so many pages more is computed then.
        """
        match = restoration.match
        contents = [self._take(group, match, *read) for group, read in enumerate(restoration.reads)]
        num_pages = self._usable(
            [[content.get(number) for number in range(match.num_pages)] for content in contents],
            match.first_page,
        )
        pages = grow(num_pages)
        for group, content in enumerate(contents):
            first = first_page_read(match.first_page + num_pages, self.page_size, self._windows[group])
            numbers = [n for n in content if max(0, first - match.first_page) <= n < num_pages]
            if numbers:
                targets = [pages[group][match.first_page + number] for number in numbers]
                data = np.stack([content[number] for number in numbers])
                self._transfer.write_pages(group, targets, data)
        return num_pages

    # Pieces ----------------------------------------------------------------------------------------------

    def _lacks(self, name: PageName, node: Node) -> bool:
        """Whether some group has the node's page and its tier does not."""
        return any(
            page and index.find(name) is None for index, page in zip(self.indices, node.pages, strict=True)
        )

    def _unsaved(self, cursor: TreeCursor) -> list[tuple[PageName, Node]]:
        """The pages of a request's text that the tiers lack, from the first on."""
        lacking: list[tuple[PageName, Node]] = []
        node: Node | None = None if cursor.root.cleared else cursor.node
        while node is not None and node.depth:
            name = _name(cursor.root, node)
            if self._lacks(name, node):
                lacking.append((name, node))
            node = node.parent
        lacking.reverse()
        return lacking

    def _start_writing(self, lacking: Sequence[tuple[PageName, Node]]) -> None:
        for group in range(len(self._windows)):
            held = [(name, node.pages[group]) for name, node in lacking if node.pages[group]]
            if held:
                read = self._transfer.read_pages(group, [page for _, page in held])
                self._writing.append(_Writing(group, [name for name, _ in held], read))

    def _names_after(self, found: PrefixMatch) -> list[PageName]:
        """The full pages of the query's text after those in the tree."""
        query, width = found.query, self.page_size * TOKEN_BYTES
        last = found.node or found.root
        key = query.domain.key(self.page_size) if last is None else last.key
        names: list[PageName] = []
        for index in range(found.num_full, query.limit // self.page_size):
            label = query.text[index * width : (index + 1) * width]
            if index not in query.keys:
                query.keys[index] = page_key(key, label)
            names.append(PageName(query.keys[index], key, label, query.domain))
            key = names[-1].key
            if all(index.find(names[-1]) is None for index in self.indices):
                break  # Nothing can be resumed beyond a page of which no group has anything.
        return names

    def _usable(self, columns: Sequence[Sequence[object | None]], start: int) -> int:
        """The most pages after page `start` for which every group has what the next token reads."""
        num_pages = len(columns[0])
        for column, window in zip(columns, self._windows, strict=True):
            if not window:
                num_pages = next((n for n, page in enumerate(column[:num_pages]) if page is None), num_pages)
        while num_pages:
            missing = [
                number
                for column, window in zip(columns, self._windows, strict=True)
                for number in range(
                    max(0, first_page_read(start + num_pages, self.page_size, window) - start), num_pages
                )
                if window and column[number] is None
            ]
            if not missing:
                break
            num_pages = max(missing)
        return num_pages

    def _take(self, group: int, match: OffloadMatch, wanted: list[int], read: TierRead) -> dict[int, Bytes]:
        """What came back of a group, by index within the match, as far as it is what was written."""
        content: dict[int, Bytes] = {}
        for number, data in zip(wanted, read.take(), strict=True):
            page = match.columns[group][number]
            if page is not None and self.indices[group].check(page, data) and data is not None:
                content[number] = data
        return content


class _Unreadable:
    """A read of which nothing will come."""

    ready = True

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def take(self) -> list[Bytes | None]:
        return [None] * self._num_slots


def _name(root: Root, node: Node) -> PageName:
    parent = node.parent
    assert parent is not None, "a page that was removed has no name"
    return PageName(node.key, parent.key, node.label, root.domain)
