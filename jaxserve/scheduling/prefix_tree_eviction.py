"""Which cached pages are given up first.

Of full-attention groups only leaves can go, since a page is of use only with all those before it. Their
order is that of the last use plus a credit for what a page saves:

    worth = last use + reuse age * (COST_CREDIT * log(relative cost) + USE_CREDIT * log(times used))

Time is counted in pages stored, which is what ages a cache. If the chance that a page is used again falls
off as exp(-age / reuse age), ordering by expected saving is ordering by the log of chance times cost: the
form above, and it never changes while a page lies idle, so a heap can keep it. The reuse age is measured:
the root mean square of the ages at which idle pages were in fact used again. A page that was used again
before, as a conversation that goes on or a prompt that many share, is likelier to be used again than one
that has not been yet.

The credits are small on purpose: larger ones save more at most pool sizes, and at others less than the order
of the last use alone. They were chosen on the one recorded trace on which `python -m benchmarks.prefix_cache`
compares the two: there the tree saves up to 1 % more, and at no size less.

Of a group with a window a page can go alone, wherever it is: then no text can be resumed whose window
reaches back to it. Its worth is the last time that a text ended, was resumed or forked within its reach;
pages over which texts only ever ran on go first, in the order in which they came.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from jaxserve.scheduling.prefix_tree_nodes import Node

RecomputeCost = Callable[[int, int], float]
"""(start, num_tokens) -> milliseconds to compute so many tokens from position `start` on."""

COST_CREDIT = 0.03
USE_CREDIT = 0.3
_AGE_MEMORY = 0.998
"""Weight of the past in the measured reuse age, for each reuse."""
_NEVER_ENDED = 1 << 60


class LeafQueue:
    """Leaves that nobody holds, least worth first. Entries are lazy: at most one for a node."""

    def __init__(self, page_size: int, recompute_cost: RecomputeCost | None) -> None:
        self._page_size = page_size
        self._recompute_cost = recompute_cost
        self._log_costs: list[float] = []
        self._heap: list[tuple[float, int, Node]] = []
        self._num_offers = 0
        self._weight = 0.0
        self._mean_square_age = 0.0
        self.clock = 0
        """Pages stored so far."""

    def note_reuse(self, node: Node) -> None:
        """A node that nobody held is used again: learn after how long that happens."""
        age = self.clock - node.last_used
        self._weight = self._weight * _AGE_MEMORY + 1
        self._mean_square_age += (age * age - self._mean_square_age) / self._weight

    def offer(self, node: Node) -> None:
        """The node has become a leaf that nobody holds."""
        credit = COST_CREDIT * self._log_cost(node.depth) + USE_CREDIT * math.log(node.num_uses)
        node.worth = node.last_used + math.sqrt(self._mean_square_age) * credit
        if not node.queued:
            self._push(node)

    def pop(self) -> Node | None:
        """The leaf of least worth, which the caller removes; None if there is none."""
        heap = self._heap
        while heap:
            worth, _, node = heappop(heap)
            node.queued = False
            if node.parent is None or node.holds or node.children:
                continue
            if node.worth > worth:
                self._push(node)
                continue
            return node
        return None

    def _push(self, node: Node) -> None:
        node.queued = True
        self._num_offers += 1
        heappush(self._heap, (node.worth, self._num_offers, node))

    def _log_cost(self, depth: int) -> float:
        """The log of what the `depth`-th page of a text costs, as a multiple of the first one's cost."""
        if self._recompute_cost is None:
            return 0.0
        first = max(self._recompute_cost(0, self._page_size), 1e-9)
        costs = self._log_costs
        while len(costs) <= depth:
            start = max(0, len(costs) - 1) * self._page_size
            costs.append(math.log(max(self._recompute_cost(start, self._page_size) / first, 1e-9)))
        return costs[depth]


class WindowPages:
    """The tree's pages of one group with a window, and which of them only the tree holds (idle ones)."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._worth: dict[int, int] = {}
        self._idle: set[int] = set()
        self._queued: set[int] = set()
        self._heap: list[tuple[int, int, int]] = []
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def add(self, page: int, node: Node, clock: int) -> None:
        """The tree holds the page for the node, beside somebody else."""
        self._nodes[page] = node
        self._worth[page] = clock - _NEVER_ENDED

    def discard(self, page: int) -> None:
        """The tree lets the page go."""
        del self._nodes[page]
        del self._worth[page]
        self._idle.discard(page)

    def touch(self, page: int, clock: int) -> None:
        """A text ends, is resumed or forks within the page's reach."""
        self._worth[page] = clock

    def became_idle(self, page: int) -> None:
        """Somebody's release has left a page with one reference, which is the tree's if the page is here."""
        if page in self._nodes:
            self._idle.add(page)
            self._push(page)

    def became_shared(self, page: int) -> None:
        """A page has got a second reference."""
        self._idle.discard(page)

    def pop(self) -> Node | None:
        """The node of the idle page of least worth, which the caller drops; None if there is none."""
        while self._heap:
            worth, _, page = heappop(self._heap)
            self._queued.discard(page)
            if page not in self._idle:
                continue
            if self._worth[page] != worth:
                self._push(page)
                continue
            return self._nodes[page]
        return None

    def _push(self, page: int) -> None:
        if page not in self._queued:
            self._queued.add(page)
            self._num_pushes += 1
            heappush(self._heap, (self._worth[page], self._num_pushes, page))
