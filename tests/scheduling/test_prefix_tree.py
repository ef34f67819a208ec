"""The prefix tree: what it finds, what it keeps, what it gives up, and what it tells."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.scheduling import PagePool, PageTable
from jaxserve.scheduling.kv_events import CacheCleared, KvEvent, PagesRemoved, PagesStored
from jaxserve.scheduling.prefix_tree import PrefixTree, TreeCursor
from jaxserve.scheduling.prefix_tree_keys import CacheDomain, CacheScope, page_key
from jaxserve.scheduling.prefix_tree_match import PrefixMatch, PrefixQuery
from jaxserve.scheduling.terms import ServiceTerms

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


def test_a_text_is_found_as_far_as_it_was_computed() -> None:
    engine = Engine()
    engine.serve(list(range(11)))
    assert engine.match(list(range(11))).num_tokens == 8, "the third page was never full"
    assert engine.match([0, 1, 2, 3, 9, 9, 9, 9]).num_tokens == 4
    assert engine.match([9, *range(11)]).num_tokens == 0
    engine.check()


def test_a_cached_prompt_still_computes_its_last_token() -> None:
    engine = Engine()
    engine.serve(list(range(8)))
    match = engine.match(list(range(8)), limit=7)
    assert (match.num_tokens, match.num_full, match.begun) == (7, 1, (2,))
    prefix = match.prefix(PAGE, (0,))
    assert (prefix.num_tokens, prefix.pages, prefix.begun) == (7, ((1,),), (2,))


def test_a_page_that_begins_alike_is_offered_for_copying() -> None:
    engine = Engine()
    for last in ([4, 5, 1, 1], [4, 5, 6, 2], [9, 9, 9, 9]):
        engine.serve([0, 1, 2, 3, *last])
    match = engine.match([0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert match.num_tokens == 7
    (page,) = match.begun
    again = engine.match([0, 1, 2, 3, 4, 5, 6, 2])
    assert again.prefix(PAGE, (0,)).pages[0][1] == page
    assert engine.match([0, 1, 2, 3, 7]).begun == ()
    assert engine.match([0, 1, 2, 3, 4, 5, 6], limit=5).num_tokens == 5


def test_no_page_is_offered_for_copying_where_none_can_be_copied() -> None:
    engine = Engine(copies_pages=False)
    engine.serve(list(range(8)))
    assert engine.match(list(range(8)), limit=7).num_tokens == 4


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(DOMAIN, model="model2"),
        dataclasses.replace(DOMAIN, kv_format="int8"),
        dataclasses.replace(DOMAIN, adapter="a"),
        dataclasses.replace(DOMAIN, scope=CacheScope("tenant", "b")),
        dataclasses.replace(DOMAIN, scope=CacheScope("namespace", "a")),
        dataclasses.replace(DOMAIN, scope=CacheScope("submission", "a")),
    ],
)
def test_domains_never_meet(other: CacheDomain) -> None:
    engine = Engine()
    engine.serve(list(range(8)))
    assert engine.match(list(range(8)), domain=other).num_tokens == 0
    assert other.key(PAGE) != DOMAIN.key(PAGE)


def test_keys_tell_every_salt_apart() -> None:
    scope = CacheScope("tenant", "x")
    domains = [
        CacheDomain("m", "f", scope),
        CacheDomain("mf", "", scope),
        CacheDomain("m", "f", scope, adapter="1"),
        CacheDomain("m", "f", scope, adapter_version="1"),
        CacheDomain("m", "f", scope, adapter="", adapter_version="1"),
        CacheDomain("m", "f", scope, adapter="1", adapter_version=""),
        CacheDomain("m", "f", CacheScope("tenant", "")),
        CacheDomain("m", "f", CacheScope("tenant", "x\0")),
    ]
    keys = {domain.key(size) for domain in domains for size in (16, 32)}
    assert len(keys) == 2 * len(domains)
    assert page_key(b"a" * 16, b"b") != page_key(b"a" * 16, b"c")


def test_a_tenant_shares_with_itself_unless_it_names_a_namespace() -> None:
    assert CacheScope.of(ServiceTerms(tenant="a")) == CacheScope("tenant", "a")
    assert CacheScope.of(ServiceTerms(tenant="a", namespace="n")) == CacheScope("namespace", "n")
    assert CacheScope.of(ServiceTerms(tenant="b", namespace="a")) != CacheScope.of(ServiceTerms(tenant="a"))


def test_two_who_compute_the_same_share_one_page_in_the_end() -> None:
    engine = Engine()
    first = engine.start(list(range(4)))
    table = PageTable(engine.pool, PAGE, (0,))
    table.grow(4)
    cursor = engine.tree.open(DOMAIN)
    duplicates = engine.tree.insert(cursor, [0, 1, 2, 3], table.pages)
    assert duplicates == [(0, 0, 1)]
    assert engine.tree.num_pages == 1
    table.replace(*duplicates[0])
    engine.check(first, (table, cursor))
    assert engine.pool.num_free(0) == 38
    engine.end(first)
    assert engine.tree.num_evictable(0) == 0
    engine.end((table, cursor))
    assert engine.tree.num_evictable(0) == 1


def test_a_request_that_does_not_read_keeps_its_own_pages() -> None:
    engine = Engine()
    engine.serve(list(range(8)))
    table = PageTable(engine.pool, PAGE, (0,))
    table.grow(12)
    cursor = engine.tree.open(DOMAIN)
    assert len(engine.tree.insert(cursor, list(range(12)), table.pages)) == 2
    engine.check((table, cursor))
    assert (engine.tree.num_pages, engine.tree.num_evictable(0)) == (3, 0)
    engine.end((table, cursor))
    assert engine.tree.num_evictable(0) == 3


def test_what_is_in_use_is_not_evicted() -> None:
    engine = Engine()
    request = engine.start(list(range(8)))
    engine.serve([0, 1, 2, 3, 7, 7, 7, 7])
    assert engine.tree.num_evictable(0) == 1
    assert engine.tree.evict([5]) == (1,)
    assert engine.match(list(range(8))).num_tokens == 8
    engine.check(request)
    engine.end(request)
    assert engine.tree.evict([1]) == (1,)
    assert engine.match(list(range(8))).num_tokens == 4, "leaves go first"
    assert engine.tree.evict([5]) == (1,)
    assert engine.pool.num_free(0) == 39
    engine.check()


def test_the_least_recently_used_go_first() -> None:
    engine = Engine()
    for text in (1, 2, 3):
        engine.serve([text] * 8)
    engine.serve([1] * 8)
    engine.tree.evict([2])
    found = [engine.match([text] * 8).num_tokens for text in (1, 2, 3)]
    assert found == [8, 0, 8]


def test_what_costs_more_stays_longer() -> None:
    """Of two texts of about the same age, the pages far down the long one cost more to compute again."""
    engine = Engine(num_pages=(200,), recompute_cost=lambda start, num_tokens: num_tokens * (1.0 + start))
    for round_number in range(3):
        engine.serve([1] * 400)
        engine.serve([2] * 8)
        engine.serve([3 + round_number] * 120)
    assert engine.tree.statistics.saved_milliseconds > 0
    engine.tree.evict([100])
    long, short = (engine.match([text] * 400).num_tokens for text in (1, 2))
    assert long > 0
    assert short == 0


def test_a_page_last_used_by_a_step_in_flight_is_free_when_that_retires() -> None:
    engine = Engine()
    request = engine.start(list(range(4)))
    engine.pool.begin_step()
    engine.end(request)
    assert engine.tree.evict([1]) == (1,)
    assert engine.pool.num_free(0) == 38
    engine.pool.retire_step()
    assert engine.pool.num_free(0) == 39


def test_an_idle_page_is_free_at_once_whatever_is_in_flight() -> None:
    engine = Engine()
    engine.serve(list(range(4)))
    engine.pool.begin_step()
    engine.tree.evict([1])
    assert engine.pool.num_free(0) == 39


def test_what_a_match_claims_is_no_longer_evictable() -> None:
    engine = Engine()
    engine.serve(list(range(16)))
    other = engine.start(list(range(8)))
    match = engine.match(list(range(16)))
    assert engine.tree.num_evictable(0) == 2
    assert engine.tree.num_claimed(match) == (2,)
    cursor = engine.tree.use(match)
    assert engine.tree.num_evictable(0) == 0
    engine.tree.close(cursor)
    engine.end(other)


def test_a_stale_match_is_refused() -> None:
    engine = Engine()
    engine.serve(list(range(8)))
    match = engine.match(list(range(8)))
    engine.tree.evict([1])
    with pytest.raises(RuntimeError, match="match again"):
        engine.tree.use(match)


def test_a_query_goes_on_from_where_it_was() -> None:
    engine = Engine()
    engine.serve(list(range(8)))
    query = PrefixQuery(DOMAIN, list(range(16)), 15)
    assert engine.tree.match(query).num_tokens == 8
    engine.serve(list(range(12)))
    assert engine.tree.match(query).num_tokens == 12
    engine.tree.evict([2])
    assert engine.tree.match(query).num_tokens == 4
    engine.tree.clear()
    assert engine.tree.match(query).num_tokens == 0
    engine.serve(list(range(4)))
    assert engine.tree.match(query).num_tokens == 4


def test_arrays_and_lists_are_the_same_text() -> None:
    engine = Engine()
    engine.serve(list(range(8)))
    for dtype in (np.int32, np.int64):
        tokens = np.arange(8, dtype=dtype)
        assert engine.tree.match(PrefixQuery(DOMAIN, tokens, 8)).num_tokens == 8


# Windows -------------------------------------------------------------------------------------------------


def test_a_text_resumes_where_every_window_can_still_be_read() -> None:
    engine = Engine(num_pages=(40, 40), windows=(0, 6))
    engine.serve(list(range(24)))
    match = engine.match(list(range(24)))
    assert match.num_tokens == 24
    prefix = match.prefix(PAGE, (0, 6))
    assert [page > 0 for page in prefix.pages[1]] == [False] * 4 + [True] * 2
    assert all(prefix.pages[0])


def test_pages_that_texts_only_ran_over_go_first_from_a_window() -> None:
    engine = Engine(num_pages=(40, 40), windows=(0, 6))
    engine.serve(list(range(24)))
    assert engine.tree.num_evictable(1) == 6
    assert engine.tree.evict([0, 4]) == (0, 4)
    assert engine.match(list(range(24))).num_tokens == 24, "its end can still be resumed"
    assert engine.match(list(range(20))).num_tokens == 0, "the window before the fifth page is gone"
    engine.check()
    assert engine.tree.evict([0, 1]) == (0, 1)
    assert engine.match(list(range(24))).num_tokens == 0
    engine.serve(list(range(24)))
    assert engine.match(list(range(24))).num_tokens == 24, "computed again, it is whole again"
    engine.check()


def test_a_fork_is_kept_longer_than_what_lies_between() -> None:
    engine = Engine(num_pages=(60, 60), windows=(0, 4))
    shared = list(range(16))
    for number in range(2):
        engine.serve([*shared, *[90 + number] * 16])
    evictable = engine.tree.num_evictable(1)
    engine.tree.evict([0, evictable - 3])
    assert engine.match([*shared, 80, 80]).num_tokens == 16


def test_a_model_of_windows_alone_drops_nodes_without_pages() -> None:
    engine = Engine(num_pages=(40,), windows=(6,))
    engine.serve(list(range(24)))
    engine.tree.evict([6])
    assert (engine.tree.num_pages, engine.tree.num_evictable(0), engine.pool.num_free(0)) == (0, 0, 39)
    removed = [page for event in engine.events if isinstance(event, PagesRemoved) for page in event.hashes]
    stored = [page for event in engine.events if isinstance(event, PagesStored) for page in event.hashes]
    assert sorted(removed) == sorted(stored)
    engine.check()


def test_a_running_request_does_not_keep_what_its_window_has_passed() -> None:
    engine = Engine(num_pages=(40, 40), windows=(0, 4))
    request = engine.start(list(range(32)))
    assert engine.tree.num_evictable(0) == 0
    evictable = engine.tree.num_evictable(1)
    assert evictable >= 5
    assert engine.tree.evict([9, 9]) == (0, evictable)
    engine.check(request)
    engine.end(request)
    engine.check()


# Clearing ------------------------------------------------------------------------------------------------


def test_clearing_forgets_at_once_and_frees_what_is_in_use_later() -> None:
    engine = Engine()
    request = engine.start(list(range(8)))
    engine.serve([5] * 8)
    assert engine.tree.clear() == 4
    assert engine.match(list(range(8))).num_tokens == 0
    assert engine.tree.num_evictable(0) == 0
    engine.check(request)
    table, cursor = request
    table.grow(12)
    engine.tree.insert(cursor, [8, 9, 10, 11], table.pages)
    assert engine.match(list(range(12))).num_tokens == 0, "it goes on outside"
    engine.check(request)
    engine.end(request)
    assert engine.pool.num_free(0) == 39
    engine.check()


def test_a_query_from_before_finds_nothing_that_was_cleared() -> None:
    engine = Engine()
    request = engine.start(list(range(8)))
    query = PrefixQuery(DOMAIN, list(range(12)), 12)
    assert engine.tree.match(query).num_tokens == 8
    engine.tree.clear()
    engine.serve([*range(4), 9])
    assert engine.tree.match(query).num_tokens == 4
    engine.end(request)


def test_clearing_a_scope_leaves_the_others() -> None:
    engine = Engine()
    other = dataclasses.replace(DOMAIN, scope=CacheScope("namespace", "n"))
    engine.serve(list(range(8)))
    engine.serve(list(range(8)), other)
    assert engine.tree.clear(DOMAIN.scope) == 2
    assert engine.match(list(range(8))).num_tokens == 0
    assert engine.match(list(range(8)), domain=other).num_tokens == 8


def test_a_cursor_is_closed_once() -> None:
    engine = Engine()
    cursor = engine.tree.open(DOMAIN)
    twin = engine.tree.fork(cursor)
    engine.tree.close(cursor)
    engine.tree.close(twin)
    with pytest.raises(RuntimeError, match="closed before"):
        engine.tree.close(cursor)
    with pytest.raises(RuntimeError, match="closed cursor"):
        engine.tree.fork(cursor)


# What it tells -------------------------------------------------------------------------------------------


def test_observers_can_follow_every_page() -> None:
    engine = Engine()
    engine.serve(list(range(8)))
    engine.serve([0, 1, 2, 3, 9, 9, 9, 9])
    first, second, fork = (event for event in engine.events if isinstance(event, PagesStored))
    assert (first.parent_hash, first.token_ids) == (None, [[0, 1, 2, 3]])
    assert (second.parent_hash, second.token_ids) == (first.hashes[0], [[4, 5, 6, 7]])
    assert (fork.parent_hash, fork.token_ids) == (first.hashes[0], [[9, 9, 9, 9]])
    assert (fork.domain, fork.page_size) == (DOMAIN, PAGE)
    known = {page for event in engine.tree.snapshot() for page in event.hashes}
    assert known == {*first.hashes, *second.hashes, *fork.hashes}
    engine.tree.evict([1])
    assert engine.events[-1] == PagesRemoved(second.hashes)
    engine.tree.clear(DOMAIN.scope)
    removed = engine.events[-1]
    assert isinstance(removed, PagesRemoved)
    assert set(removed.hashes) == {*first.hashes, *fork.hashes}
    engine.tree.clear()
    assert engine.events[-1] == CacheCleared()
    assert engine.tree.snapshot() == []


def test_pages_stored_together_are_told_together() -> None:
    engine = Engine()
    cursor = engine.tree.open(DOMAIN)
    engine.tree.insert(cursor, list(range(12)), [[engine.pool.acquire(0) for _ in range(3)]])
    (event,) = engine.events
    assert isinstance(event, PagesStored)
    assert event.token_ids == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(set(event.hashes)) == 3


def test_statistics_count_tokens_and_milliseconds() -> None:
    engine = Engine(recompute_cost=lambda start, num_tokens: 0.5 * num_tokens)
    engine.serve(list(range(8)))
    engine.serve(list(range(12)))
    engine.tree.evict([1])
    statistics = engine.tree.statistics
    assert (statistics.query_tokens, statistics.hit_tokens) == (20, 8)
    assert statistics.saved_milliseconds == 4.0
    assert (statistics.stored_pages, statistics.evicted_pages) == (3, 1)


def test_bad_input_is_named() -> None:
    pool = PagePool([4])
    with pytest.raises(ValueError, match="page_size 0"):
        PrefixTree(pool, 0, (0,))
    with pytest.raises(ValueError, match="2 windows for a pool of 1 cache groups"):
        PrefixTree(pool, 4, (0, 0))
    with pytest.raises(ValueError, match="limit 3 is out of range: the text has 2 tokens"):
        PrefixQuery(DOMAIN, [1, 2], 3)
    tree = PrefixTree(pool, 4, (0,))
    with pytest.raises(ValueError, match="3 tokens are no whole number of pages of 4"):
        tree.insert(tree.open(DOMAIN), [1, 2, 3], [[1]])
