"""Random requests over a tiny pool: a match holds exactly the tokens that it says, and nothing is lost.

The model is the content of every page: what the device would have written into it. A request computes what it
does not find, so each full page has known tokens, a known text before it, and a known domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.scheduling import PagePool, PageTable
from jaxserve.scheduling.kv_events import CacheCleared, KvEvent, PagesRemoved, PagesStored
from jaxserve.scheduling.prefix_tree import PrefixTree, TreeCursor
from jaxserve.scheduling.prefix_tree_keys import CacheDomain, CacheScope
from jaxserve.scheduling.prefix_tree_match import PrefixMatch, PrefixQuery

PAGE = 3
POOLS = [((14,), (0,)), ((14, 9), (0, 5)), ((12,), (4,)), ((16, 9, 8), (0, 7, 2))]
DOMAINS = [
    CacheDomain("m", "f", CacheScope("tenant", "a")),
    CacheDomain("m", "f", CacheScope("namespace", "a")),
    CacheDomain("m", "f", CacheScope("tenant", "b"), adapter="x"),
]
texts = st.builds(
    lambda pages, tail: [token for page in pages for token in page] + tail,
    st.lists(st.sampled_from([[0, 0, 0], [0, 0, 1]]), max_size=4),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)
"""Few enough that requests meet."""
domains = st.sampled_from([DOMAINS[0], DOMAINS[0], *DOMAINS])


@dataclass
class FakeRequest:
    domain: CacheDomain
    tokens: list[int]
    table: PageTable
    cursor: TreeCursor
    writes: bool
    takes_shared: bool
    num_computed: int = 0
    cleared: bool = False
    """Whether its domain has been cleared since it started."""


class TreeMachine(RuleBasedStateMachine):
    @initialize(pool=st.sampled_from(POOLS), copies_pages=st.booleans())
    def start(self, pool: Any, copies_pages: bool) -> None:
        num_pages, self.windows = pool
        self.pool = PagePool(num_pages)
        self.events: list[KvEvent] = []
        self.tree = PrefixTree(
            self.pool,
            PAGE,
            self.windows,
            recompute_cost=lambda start, num_tokens: num_tokens * (1.0 + start),
            on_event=lambda make: self.events.append(make()),
            copies_pages=copies_pages,
        )
        self.content: list[dict[int, list[tuple[int, ...]]]] = [{} for _ in self.windows]
        """What the device has in each page: for each row, the domain and the whole text up to it."""
        self.running: list[FakeRequest] = []
        self.served: list[tuple[CacheDomain, list[int]]] = []
        self.queries: dict[int, PrefixQuery] = {}
        self.in_flight = 0
        self.observed: set[int] = set()

    # What a scheduler would do ---------------------------------------------------------------------------

    def make_room(self, num_pages: int) -> bool:
        groups = range(len(self.windows))
        short = [max(0, num_pages - self.pool.num_free(group)) for group in groups]
        promised = [self.tree.num_evictable(group) for group in groups]
        if any(need > have for need, have in zip(short, promised, strict=True)):
            return False
        given_up = self.tree.evict(short)
        assert all(got >= need for got, need in zip(given_up, short, strict=True))
        return all(self.pool.num_free(group) >= num_pages for group in groups)

    def pages_in_use(self) -> list[list[int]]:
        return [
            [page for request in self.running for page in request.table.pages[group] if page]
            for group in range(len(self.windows))
        ]

    def write(self, request: FakeRequest, end: int) -> None:
        for position in range(request.num_computed, end):
            index, row = divmod(position, PAGE)
            text = (DOMAINS.index(request.domain), *request.tokens[: position + 1])
            for group, pages in enumerate(request.table.pages):
                rows = self.content[group].setdefault(pages[index], [])
                rows[row:] = [text]
        request.num_computed = end

    def check_match(self, query: PrefixQuery, match: PrefixMatch) -> None:
        prefix = match.prefix(PAGE, self.windows)
        assert prefix.num_tokens == match.num_tokens <= query.limit
        number = DOMAINS.index(query.domain)
        tokens = [int(t) for t in memoryview(query.text).cast("i")]
        for group, window in enumerate(self.windows):
            start = max(0, match.num_tokens - window + 1) if window else 0
            columns = prefix.pages[group] + ((prefix.begun[group],) if prefix.begun else ())
            for position in range(start, match.num_tokens):
                page = columns[position // PAGE]
                assert page
                assert self.content[group][page][position % PAGE] == (number, *tokens[: position + 1])

    # Rules -----------------------------------------------------------------------------------------------

    @rule(
        text=texts,
        domain=domains,
        reads=st.booleans(),
        writes=st.booleans(),
        takes_shared=st.booleans(),
    )
    def admit(self, **request: Any) -> None:
        self.admit_one(**request)

    def admit_one(
        self, text: list[int], domain: CacheDomain, reads: bool, writes: bool, takes_shared: bool
    ) -> None:
        table = PageTable(self.pool, PAGE, self.windows)
        request = FakeRequest(domain, text, table, self.tree.open(domain), writes, takes_shared)
        if reads:
            query = PrefixQuery(domain, text, len(text) - 1)
            match = self.tree.match(query)
            self.check_match(query, match)
            again = self.tree.match(query)
            assert (again.node, again.num_tokens, again.begun) == (match.node, match.num_tokens, match.begun)
            self.tree.close(request.cursor)
            match = self.tree.match(query)
            claimed = self.tree.num_claimed(match)
            before = [self.tree.num_evictable(group) for group in range(len(self.windows))]
            request.cursor = self.tree.use(match)
            prefix = match.prefix(PAGE, self.windows)
            if prefix.begun and min(self.pool.num_free(g) for g in range(len(self.windows))) < 1:
                self.tree.close(request.cursor)
                return
            copies = table.adopt(prefix)
            for group, source, target in copies:
                self.content[group][target] = list(self.content[group][source])
            request.num_computed = prefix.num_tokens
            after = [self.tree.num_evictable(group) for group in range(len(self.windows))]
            assert tuple(b - a for b, a in zip(before, after, strict=True)) == claimed
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 2, 4, 7, 20]))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        self.compute_some(data.draw(st.sampled_from(self.running)), num_tokens)

    def compute_some(self, request: FakeRequest, num_tokens: int) -> None:
        end = min(len(request.tokens), request.num_computed + num_tokens)
        request.table.pass_window(request.num_computed)
        missing = -(-end // PAGE) - request.table.num_spanned
        if missing > 0 and not self.make_room(missing):
            return
        request.table.grow(end)
        self.write(request, end)
        start, stop = request.cursor.num_tokens, end // PAGE * PAGE
        if request.writes and stop > start:
            duplicates = self.tree.insert(request.cursor, request.tokens[start:stop], request.table.pages)
            for group, index, page in duplicates:
                own = request.table.pages[group][index]
                assert self.content[group][page] == self.content[group][own]
                if request.takes_shared:
                    request.table.replace(group, index, page)

    @rule(text=texts, domain=domains)
    def serve(self, text: list[int], domain: CacheDomain) -> None:
        """A request that comes, computes everything if there is room, and goes."""
        self.admit_one(text, domain, reads=True, writes=True, takes_shared=True)
        if self.running and self.running[-1].tokens is text:
            self.compute_some(self.running[-1], len(text))
            self.end_one(self.running[-1])
        self.served.append((domain, list(text)))

    @precondition(lambda self: self.served)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def come_back(self, data: st.DataObject, more: list[int]) -> None:
        """A conversation goes on."""
        domain, text = data.draw(st.sampled_from(self.served))
        self.admit_one(text + more, domain, reads=True, writes=True, takes_shared=True)

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """Somebody who waits looks again at what he has looked at before."""
        number = data.draw(st.integers(0, len(self.served) - 1))
        domain, text = self.served[number]
        query = self.queries.setdefault(number, PrefixQuery(domain, text, len(text)))
        match = self.tree.match(query)
        self.check_match(query, match)
        fresh = self.tree.match(PrefixQuery(domain, text, len(text)))
        assert (match.node, match.num_tokens, match.begun) == (fresh.node, fresh.num_tokens, fresh.begun)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def say_more(self, data: st.DataObject, tokens: list[int]) -> None:
        data.draw(st.sampled_from(self.running)).tokens.extend(tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.tree.close(self.tree.fork(request.cursor))
        self.tree.mark_end(request.cursor)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_one(data.draw(st.sampled_from(self.running)))

    def end_one(self, request: FakeRequest) -> None:
        self.running.remove(request)
        request.table.clear()
        self.tree.close(request.cursor)

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        groups = range(len(self.windows))
        promised = [self.tree.num_evictable(group) for group in groups]
        given_up = self.tree.evict([num_pages] * len(self.windows))
        for promise, got in zip(promised, given_up, strict=True):
            assert min(num_pages, promise) <= got <= promise

    @precondition(lambda self: len(self.served) > 2)
    @rule(scope=st.sampled_from([*(domain.scope for domain in DOMAINS), None]))
    def clear(self, scope: CacheScope | None) -> None:
        self.tree.clear(scope)
        for request in self.running:
            request.cleared |= scope is None or request.domain.scope == scope
        for domain in DOMAINS:
            if scope is None or domain.scope == scope:
                assert self.tree.match(PrefixQuery(domain, [0, 0, 0, 1], 4)).num_tokens == 0

    @rule()
    def begin_step(self) -> None:
        self.pool.begin_step()
        self.in_flight += 1

    @precondition(lambda self: self.in_flight)
    @rule()
    def retire_step(self) -> None:
        self.pool.retire_step()
        self.in_flight -= 1

    # What always holds -----------------------------------------------------------------------------------

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check_integrity([*self.tree.holders(), *(request.table.pages for request in self.running)])
        self.tree.check_integrity()

    @invariant()
    def evictable_is_what_nobody_else_holds(self) -> None:
        """Counted apart: full groups, nodes that no cursor is at or below; windows, pages held once."""
        in_use = [set(pages) for pages in self.pages_in_use()]
        (columns,) = self.tree.holders()
        for group, window in enumerate(self.windows):
            free_of_others = [page for page in columns[group] if page and page not in in_use[group]]
            if window:
                assert self.tree.num_evictable(group) == len(free_of_others)
            else:
                assert self.tree.num_evictable(group) <= len(free_of_others)

    @invariant()
    def what_is_in_use_can_be_matched(self) -> None:
        if any(self.windows):
            return
        for request in self.running:
            num_tokens = request.cursor.num_tokens
            if not request.cleared:
                match = self.tree.match(PrefixQuery(request.domain, request.tokens, num_tokens))
                assert match.num_tokens == num_tokens

    @invariant()
    def observers_know_what_can_be_matched(self) -> None:
        for event in self.events:
            if isinstance(event, PagesStored):
                assert event.parent_hash is None or event.parent_hash in self.observed
                assert self.observed.isdisjoint(event.hashes)
                self.observed.update(event.hashes)
            elif isinstance(event, PagesRemoved):
                assert self.observed.issuperset(event.hashes)
                self.observed.difference_update(event.hashes)
            else:
                assert isinstance(event, CacheCleared)
                self.observed.clear()
        self.events.clear()
        assert self.observed == {page for event in self.tree.snapshot() for page in event.hashes}

    def teardown(self) -> None:
        for request in self.running:
            request.table.clear()
            self.tree.close(request.cursor)
        self.running.clear()
        while self.in_flight:
            self.retire_step()
        groups = range(len(self.windows))
        self.tree.evict(self.pool.num_pages)
        assert self.tree.num_pages == 0
        assert [self.pool.num_free(group) for group in groups] == [n - 1 for n in self.pool.num_pages]


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
