"""The nodes of the prefix tree: a full page of tokens each, below the page that comes before it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from jaxserve.scheduling.prefix_tree_keys import CacheDomain, common_tokens, page_key


class Node:
    """One page of tokens after all those above it. Mutable host state, identified by object.

    Children stand in the order of their labels, so that the one that begins most alike is a neighbour of
    the place where a label would stand.
    """

    __slots__ = (
        "_key",
        "children",
        "depth",
        "holds",
        "label",
        "last_used",
        "num_uses",
        "pages",
        "parent",
        "queued",
        "worth",
    )

    def __init__(self, parent: Node | None, label: bytes, pages: list[int]) -> None:
        self.parent = parent
        """None for a root and for a node that has been removed."""
        self.label = label
        """Its token ids (`encode_tokens`)."""
        self.pages = pages
        """Its page in each cache group; 0 where the group has a window and the page is not held any more."""
        self.depth = 0 if parent is None else parent.depth + 1
        """Pages from the start of the text to the end of this one."""
        self.holds = 0
        """Cursors that stand here, and children that are held: it stays while there is any."""
        self.children: list[Node] = []
        self.last_used = 0
        """When it was last held, on the clock of the eviction queue."""
        self.num_uses = 0
        """How many times it ceased to be held."""
        self.worth = 0.0
        """Its place in the eviction queue as it was last offered."""
        self.queued = False
        """Whether the eviction queue has an entry for it."""
        self._key: bytes | None = None

    @property
    def key(self) -> bytes:
        """The digest that stands for the whole text up to here; made when it is first asked for.

        It must have been asked for once if it is to be known after the node's removal.
        """
        unnamed: list[Node] = []
        node = self
        while node._key is None:
            unnamed.append(node)
            parent = node.parent
            assert parent is not None, "a node that was removed before its key was asked for has none"
            node = parent
        key = node._key
        for node in reversed(unnamed):
            key = node._key = page_key(key, node.label)
        return key

    @property
    def named(self) -> bool:
        """Whether the key has been asked for."""
        return self._key is not None

    def find(self, label: bytes) -> Node | None:
        """The child with this label."""
        children = self.children
        if not children:
            return None
        at = bisect_left(children, label, key=_LABEL)
        if at < len(children) and children[at].label == label:
            return children[at]
        return None

    def add(self, label: bytes, pages: list[int]) -> Node:
        """Make a child; there is none with this label."""
        child = Node(self, label, pages)
        children = self.children
        children.insert(bisect_left(children, label, key=_LABEL) if children else 0, child)
        return child

    def remove(self) -> Node:
        """Take this node, which has no children, out of the tree; return what was its parent."""
        parent = self.parent
        assert parent is not None, "a root or a removed node cannot be removed"
        assert not self.children, "only a leaf can be removed"
        del parent.children[bisect_left(parent.children, self.label, key=_LABEL)]
        self.parent = None
        return parent

    def most_alike(self, text: bytes) -> tuple[Node, int] | None:
        """The child that shares the most leading tokens with `text`, and their number; None if none does."""
        at = bisect_left(self.children, text, key=_LABEL)
        best: tuple[Node, int] | None = None
        for child in self.children[max(0, at - 1) : at + 1]:
            num_tokens = common_tokens(child.label, text)
            if num_tokens > (best[1] if best else 0):
                best = child, num_tokens
        return best

    def below(self) -> Iterator[Node]:
        """Every node below this one, parents before children."""
        stack = list(self.children)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)


class Root(Node):
    """The start of every text of a domain."""

    __slots__ = ("cleared", "domain")

    def __init__(self, domain: CacheDomain, page_size: int) -> None:
        super().__init__(None, b"", [])
        self._key = domain.key(page_size)
        self.domain = domain
        self.cleared = False
        """Whether the domain has been cleared since: nothing below can be matched any more."""


_LABEL = attrgetter("label")
