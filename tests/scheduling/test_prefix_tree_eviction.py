"""What the prefix tree gives up: which pages go first, what windows let go of, what clearing forgets."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.scheduling.kv_events import PagesRemoved, PagesStored
from jaxserve.scheduling.prefix_tree_keys import CacheScope
from jaxserve.scheduling.prefix_tree_match import PrefixQuery
from tests.scheduling.tree_engine import DOMAIN, PAGE, Engine


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
