"""The prefix tree: what it finds, for whom, and what it tells of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.scheduling import PagePool, PageTable
from jaxserve.scheduling.kv_events import CacheCleared, PagesRemoved, PagesStored
from jaxserve.scheduling.prefix_tree import PrefixTree
from jaxserve.scheduling.prefix_tree_keys import CacheDomain, CacheScope, page_key
from jaxserve.scheduling.prefix_tree_match import PrefixQuery
from jaxserve.scheduling.terms import ServiceTerms
from tests.scheduling.tree_engine import DOMAIN, PAGE, Engine


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
