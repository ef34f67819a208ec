"""What the prefix tree is made of: its nodes, who holds them, and the references that it has to pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.scheduling.pages import PagePool
from jaxserve.scheduling.prefix_tree_eviction import LeafQueue, RecomputeCost, WindowPages
from jaxserve.scheduling.prefix_tree_keys import CacheDomain
from jaxserve.scheduling.prefix_tree_match import first_page_read
from jaxserve.scheduling.prefix_tree_nodes import Node, Root


class NodeStore:
    """Nodes by domain. Those that are held stay; the others can be evicted, from the leaves on."""

    def __init__(
        self, pool: PagePool, page_size: int, windows: Sequence[int], recompute_cost: RecomputeCost | None
    ) -> None:
        self.pool = pool
        self.windows = tuple(windows)
        self._page_size = page_size
        self._evicts_leaves = 0 in self.windows
        self._roots: dict[CacheDomain, Root] = {}
        self._cleared: dict[Root, None] = {}
        """Roots that were cleared while somebody held nodes below them."""
        self.num_nodes = 0
        self._num_held = 0
        self._leaves = LeafQueue(page_size, recompute_cost)
        self._window_pages = {group: WindowPages() for group, window in enumerate(windows) if window}
        for group, pages in self._window_pages.items():
            pool.watch(group, pages)
        self.removed: list[Node] = []
        """Nodes that can no longer be matched and that the tree has not reported yet."""
        self.num_evicted = 0
        self.num_dropped = 0
        self.epoch = 0
        """How often pages have been let go: a match from before may name some of them."""

    # Nodes -----------------------------------------------------------------------------------------------

    def root(self, domain: CacheDomain) -> Root | None:
        return self._roots.get(domain)

    def grow_root(self, domain: CacheDomain) -> Root:
        """The root of the domain, made if there is none; it goes when it has neither children nor holds."""
        root = self._roots.get(domain)
        if root is None:
            root = self._roots[domain] = Root(domain, self._page_size)
        return root

    def roots(self) -> list[Root]:
        """Those from which texts are matched."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Every node, also what is still held below cleared roots."""
        for root in (*self._roots.values(), *self._cleared):
            yield from root.below()

    def add(self, node: Node, label: bytes, pages: list[int]) -> Node:
        """A new child, with references to these pages."""
        if node.children and self._window_pages:
            self.touch_reach(node)  # Texts fork here, and the next may well do so too.
        child = node.add(label, pages)
        for group, page in enumerate(pages):
            if page:
                self._take(child, group, page)
        self.num_nodes += 1
        self._leaves.clock += 1
        return child

    def merge(self, node: Node, own: list[int]) -> list[tuple[int, int, int]]:
        """Fill what the node lacks from a request's own pages; return what it has in place of the others."""
        pages, index = node.pages, node.depth - 1
        duplicates: list[tuple[int, int, int]] = []
        for group, page in enumerate(own):
            if page and not pages[group]:
                pages[group] = page
                self._take(node, group, page)
            elif page and page != pages[group]:
                duplicates.append((group, index, pages[group]))
        return duplicates

    def clear(self, root: Root) -> None:
        """No text is matched from this root any more. What is held stays until it is held no more."""
        del self._roots[root.domain]
        root.cleared = True
        nodes = list(root.below())
        self.removed += nodes
        for node in reversed(nodes):
            if not node.holds:
                self._give_back(node)
        if root.holds:
            self._cleared[root] = None

    @property
    def num_stored(self) -> int:
        """Nodes that were ever added."""
        return self._leaves.clock

    # Holds -----------------------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """One more hold; a node that is held for the first time holds its parent."""
        if not node.holds and node.depth:
            self._leaves.note_reuse(node)
        at: Node | None = node
        while at is not None:
            at.holds += 1
            if at.holds > 1:
                return
            if at.depth:
                self._num_held += 1
            at = at.parent

    def move_hold(self, node: Node, child: Node) -> None:
        """Move one hold from a node to its child."""
        child.holds += 1
        if child.holds == 1:
            self._num_held += 1  # The hold on the node is the child's from now on.
        else:
            node.holds -= 1

    def release_hold(self, node: Node, root: Root) -> None:
        """One hold less; a node that is held no more releases its parent."""
        while True:
            node.holds -= 1
            if node.holds:
                return
            parent = node.parent
            if parent is None:
                self._forget_if_bare(root)
                return
            self._num_held -= 1
            node.last_used = self._leaves.clock
            node.num_uses += 1
            self._let_idle(node, root)
            node = parent

    def _let_idle(self, node: Node, root: Root) -> None:
        """Nobody holds the node any more."""
        if node.children:
            return
        if root.cleared:
            self._give_back(node)
        elif self._evicts_leaves:
            self._leaves.offer(node)
        elif not any(node.pages):
            self.removed.append(node)
            self._give_back(node)

    # Eviction --------------------------------------------------------------------------------------------

    def num_evictable(self, group: int) -> int:
        window_pages = self._window_pages.get(group)
        return self.num_nodes - self._num_held if window_pages is None else window_pages.num_idle

    def evict(self, num_pages: Sequence[int]) -> tuple[int, ...]:
        """Give up at least so many pages of each group, or all that can be; return how many of each."""
        given_up = [0] * len(self.windows)
        num_leaves = max((num_pages[g] for g, window in enumerate(self.windows) if not window), default=0)
        for _ in range(num_leaves):
            node = self._leaves.pop()
            if node is None:
                break
            self._evict_leaf(node, given_up)
        for group, window_pages in self._window_pages.items():
            while given_up[group] < num_pages[group]:
                node = window_pages.pop()
                if node is None:
                    break
                self._drop_page(node, group)
                given_up[group] += 1
        return tuple(given_up)

    def touch_reach(self, node: Node) -> None:
        """The text up to this node ends, is resumed or forks here: what its windows read is worth keeping."""
        for group, window_pages in self._window_pages.items():
            first = first_page_read(node.depth, self._page_size, self.windows[group])
            at: Node | None = node
            while at is not None and at.depth > first:
                if at.pages[group]:
                    window_pages.touch(at.pages[group], self._leaves.clock)
                at = at.parent

    def _evict_leaf(self, node: Node, given_up: list[int]) -> None:
        for group, page in enumerate(node.pages):
            given_up[group] += page > 0
        self.removed.append(node)
        self.num_evicted += 1
        parent = self._give_back(node)
        if isinstance(parent, Root):
            self._forget_if_bare(parent)
        elif not parent.holds and not parent.children:
            self._leaves.offer(parent)

    def _drop_page(self, node: Node, group: int) -> None:
        """Give up a node's page in a group with a window; nodes that are left with none go too."""
        page = node.pages[group]
        node.pages[group] = 0
        self._release(group, page)
        self.num_dropped += 1
        while node.depth and not (node.holds or node.children or any(node.pages)):
            self.removed.append(node)
            self.num_evicted += 1
            node = self._give_back(node)
        if isinstance(node, Root):
            self._forget_if_bare(node)

    def _give_back(self, node: Node) -> Node:
        """Remove a leaf that nobody holds and release its pages; return what was its parent."""
        for group, page in enumerate(node.pages):
            if page:
                self._release(group, page)
        self.num_nodes -= 1
        return node.remove()

    def _take(self, node: Node, group: int, page: int) -> None:
        self.pool.retain(group, page)
        if self.windows[group]:
            self._window_pages[group].add(page, node, self._leaves.clock)

    def _release(self, group: int, page: int) -> None:
        self.epoch += 1
        if self.windows[group]:
            self._window_pages[group].discard(page)
        self.pool.release_unused(group, page)

    def _forget_if_bare(self, root: Root) -> None:
        if root.holds or root.children:
            return
        if root.cleared:
            self._cleared.pop(root, None)
        else:
            self._roots.pop(root.domain, None)

    # Accounts --------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise RuntimeError unless holds, counts and the pool account for one another."""
        nodes = list(self.nodes())
        num_held = sum(node.holds > 0 for node in nodes)
        if (self.num_nodes, self._num_held) != (len(nodes), num_held):
            raise RuntimeError(
                f"{len(nodes)} nodes, {num_held} of them held, are counted as {self.num_nodes} "
                f"and {self._num_held}"
            )
        for node in nodes:
            if node.holds < sum(child.holds > 0 for child in node.children):
                raise RuntimeError(f"a node at depth {node.depth} is held {node.holds} times, too few")
            for group, page in enumerate(node.pages):
                idle = page > 0 and self.pool.held_once(group, page)
                if page and not node.holds and not idle:
                    raise RuntimeError(f"page {page} of group {group} is used without a hold on its node")
                window_pages = self._window_pages.get(group)
                if page and window_pages is not None and window_pages.is_idle(page) != idle:
                    raise RuntimeError(f"page {page} of group {group} is not counted as the pool counts it")
