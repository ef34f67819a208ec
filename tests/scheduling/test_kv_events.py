"""The log of cache events: batches, replay, bounds, listeners."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from jaxserve.scheduling.kv_events import CacheCleared, KvEventLog, PagesRemoved


def make_log(max_batches: int = 10) -> KvEventLog:
    """A log that somebody reads."""
    log = KvEventLog(max_batches, clock=lambda: 12.5)
    log.read(1)
    return log


def test_before_the_first_reader_nothing_is_made_and_he_has_missed_a_batch() -> None:
    def make() -> PagesRemoved:
        raise AssertionError("nobody reads")

    log = KvEventLog(clock=lambda: 12.5)
    for _ in range(3):
        log.add(make)
        log.flush()
    page = log.read(1)
    assert (page.batches, page.num_missed, log.last_sequence_number) == ((), 1, 1)
    log.add(CacheCleared)
    log.flush()
    page = log.read(2)
    assert ([batch.sequence_number for batch in page.batches], page.num_missed) == ([2], 0)


def test_a_flush_makes_one_batch_of_what_was_added() -> None:
    log = make_log()
    log.flush()
    assert log.last_sequence_number == 0
    log.add(partial(PagesRemoved, (1,)))
    log.add(CacheCleared)
    assert log.read(1).batches == ()
    log.flush()
    (batch,) = log.read(1).batches
    assert (batch.sequence_number, batch.timestamp) == (1, 12.5)
    assert batch.events == (PagesRemoved((1,)), CacheCleared())


def test_a_reader_goes_on_from_any_number() -> None:
    log = make_log()
    for number in range(5):
        log.add(partial(PagesRemoved, (number,)))
        log.flush()
    page = log.read(3, max_batches=2)
    assert ([batch.sequence_number for batch in page.batches], page.num_missed) == ([3, 4], 0)
    assert log.read(6).batches == ()
    assert log.read(99).batches == ()


def test_a_reader_that_falls_behind_is_told() -> None:
    log = make_log(max_batches=3)
    for number in range(10):
        log.add(partial(PagesRemoved, (number,)))
        log.flush()
    page = log.read(4)
    assert ([batch.sequence_number for batch in page.batches], page.num_missed) == ([8, 9, 10], 4)


def test_listeners_hear_of_every_batch_until_they_stop() -> None:
    log = make_log()
    heard: list[int] = []
    stop = log.listen(lambda: heard.append(log.last_sequence_number))
    for _ in range(2):
        log.add(CacheCleared)
        log.flush()
    stop()
    stop()
    log.add(CacheCleared)
    log.flush()
    assert heard == [1, 2]


def test_a_reader_on_another_thread_sees_every_batch_once() -> None:
    log = KvEventLog(max_batches=2_000)
    ready = threading.Event()
    log.listen(ready.set)
    seen: list[int] = []

    def read() -> None:
        while len(seen) < 1_000:
            ready.wait(5)
            ready.clear()
            seen.extend(batch.sequence_number for batch in log.read(len(seen) + 1).batches)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(1_000):
        log.add(CacheCleared)
        log.flush()
    reader.join(20)
    assert seen == list(range(1, 1_001))


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="max_batches 0"):
        KvEventLog(0)
    with pytest.raises(ValueError, match="start 0"):
        make_log().read(0)
