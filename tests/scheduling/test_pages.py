"""Pages: reference counts, deferred reuse, windows, sharing, and the integrity check that finds a fault."""

from __future__ import annotations

import pytest

from jaxserve.scheduling import PagePool, PageTable
from jaxserve.scheduling.pages import max_pages_spanned


def test_every_page_but_the_sink_is_given_out_once() -> None:
    pool = PagePool([5, 3])
    assert [pool.acquire(0) for _ in range(4)] == [1, 2, 3, 4]
    assert [pool.acquire(1) for _ in range(2)] == [1, 2]
    assert pool.num_free(0) == pool.num_free_everywhere == 0


def test_a_page_is_free_after_its_last_release() -> None:
    pool = PagePool([2])
    page = pool.acquire(0)
    pool.retain(0, page)
    pool.release(0, page)
    assert pool.num_free(0) == 0
    assert pool.held_once(0, page)
    pool.release(0, page)
    assert pool.num_free(0) == 1
    with pytest.raises(AssertionError, match="page 1 of group 0 is not held"):
        pool.release(0, page)
    with pytest.raises(AssertionError, match="page 1 of group 0 is not held"):
        pool.retain(0, page)


def test_a_page_released_under_steps_in_flight_is_free_when_the_latest_of_them_retires() -> None:
    pool = PagePool([3])
    first, second = pool.acquire(0), pool.acquire(0)
    pool.begin_step()
    pool.release(0, first)
    pool.begin_step()
    pool.release(0, second)
    assert pool.num_free(0) == 0
    assert pool.returning
    pool.retire_step()
    assert pool.acquire(0) == first
    assert pool.num_free(0) == 0
    pool.retire_step()
    assert pool.acquire(0) == second
    with pytest.raises(AssertionError, match="no step is in flight"):
        pool.retire_step()


def test_a_pool_needs_a_page_beside_the_sink() -> None:
    with pytest.raises(ValueError, match=r"at least 2 pages, got \(4, 1\)"):
        PagePool([4, 1])


def test_integrity_finds_a_page_that_nobody_holds() -> None:
    pool = PagePool([3])
    page = pool.acquire(0)
    pool.check_integrity([[[page]]])
    with pytest.raises(RuntimeError, match="page 1 of group 0: 1 references, 0 holders"):
        pool.check_integrity([])
    with pytest.raises(RuntimeError, match="page 1 of group 0: 1 references, 2 holders"):
        pool.check_integrity([[[page]], [[page]]])


def test_a_table_spans_its_tokens_in_every_group() -> None:
    pool = PagePool([10, 10])
    table = PageTable(pool, 4, [0, 0])
    assert table.grow(5) == [(0, 0, 1), (1, 0, 1), (0, 1, 2), (1, 1, 2)]
    assert table.grow(8) == []
    assert table.num_tokens_available(8) == 7 * 4
    table.clear()
    pool.check_integrity([])


@pytest.mark.parametrize(("position", "passed"), [(5, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
def test_pages_wholly_behind_the_window_of_the_next_token_are_released(position: int, passed: int) -> None:
    pool = PagePool([10, 10])
    table = PageTable(pool, 4, [0, 6])
    table.grow(14)
    table.pass_window(position)
    assert table.pages == [[1, 2, 3, 4], [0] * passed + [1, 2, 3, 4][passed:]]
    assert (pool.num_free(0), pool.num_free(1)) == (5, 5 + passed)
    pool.check_integrity([table.pages])


def test_shared_pages_outlive_the_one_who_computed_them() -> None:
    pool = PagePool([10, 10])
    leader, heir = PageTable(pool, 4, [0, 6]), PageTable(pool, 4, [0, 6])
    leader.grow(14)
    prefix = leader.share(12)
    assert (prefix.num_tokens, prefix.num_full, prefix.begun) == (12, 3, ())
    assert prefix.pages == ((1, 2, 3), (0, 2, 3)), "the token at 12 reads from 7 on in a window of 6"
    leader.clear()
    assert heir.adopt(prefix) == []
    pool.check_integrity([heir.pages, prefix.pages])
    heir.pass_window(13)
    assert heir.pages[1] == [0, 0, 3]
    heir.grow(13)
    heir.clear()
    pool.check_integrity([prefix.pages])


def test_a_begun_page_is_copied_and_not_shared() -> None:
    pool = PagePool([10, 10])
    leader, heir = PageTable(pool, 4, [0, 6]), PageTable(pool, 4, [0, 6])
    leader.grow(14)
    prefix = leader.share(14)
    assert (prefix.num_tokens, prefix.num_full, prefix.begun) == (14, 3, (4, 4))
    assert heir.adopt(prefix) == [(0, 4, 5), (1, 4, 5)]
    assert heir.pages == [[1, 2, 3, 5], [0, 0, 3, 5]], "the token at 14 reads from 9 on in a window of 6"
    held = [[page for g, page in prefix.held if g == group] for group in range(2)]
    pool.check_integrity([leader.pages, heir.pages, held])


def test_a_page_that_no_step_uses_any_more_is_free_at_once() -> None:
    pool = PagePool([4])
    kept, used = pool.acquire(0), pool.acquire(0)
    for page in (kept, used):
        pool.retain(0, page)
    pool.begin_step()
    pool.release(0, kept)
    pool.retire_step()
    pool.begin_step()
    pool.release(0, used)
    pool.release_unused(0, used)
    assert pool.num_free(0) == 1, "the step in flight may still read it"
    pool.release_unused(0, kept)
    assert pool.num_free(0) == 2
    pool.retire_step()
    assert pool.num_free(0) == 3
    pool.check_integrity([])


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 1), (2, 2), (5, 2), (6, 3), (9, 3), (10, 4)])
def test_most_pages_that_consecutive_tokens_touch(num_tokens: int, most: int) -> None:
    touched = {len({(start + i) // 4 for i in range(num_tokens)}) for start in range(4)}
    assert max(touched) == max_pages_spanned(num_tokens, 4) == most
