"""Replicas share the queue and nothing else: who goes to which, and what is told of their caches."""

from __future__ import annotations

import pytest

from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import CacheIdentity, CacheScope, Scheduler
from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.kv_events import PagesRemoved, PagesStored
from tests.fake_limits import make_limits
from tests.fake_replicas import FakeReplicas
from tests.scheduling.test_scheduler import complete, submit

IDENTITY = CacheIdentity(model="fake", kv_format="fake")
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
TEXT = list(range(20, 60))


def make_loop(
    num_slots: int = 12, num_replicas: int = 2, num_pages: int = 200
) -> tuple[HostLoop, FakeReplicas]:
    limits = make_limits(num_slots=num_slots, num_pages=(num_pages,), num_replicas=num_replicas)
    engine = FakeReplicas(limits)
    return HostLoop(engine, cache=IDENTITY), engine


def place(engine: FakeReplicas) -> int:
    """The replica of the request that was loaded last."""
    return engine.loads[-1].slot * engine.limits.num_replicas // engine.limits.num_slots


def start(loop: HostLoop, engine: FakeReplicas, name: str, prompt: list[int], params: SamplingParams) -> int:
    """Where a request comes to run."""
    num_loads = len(engine.loads)
    loop.add(name, prompt, params)
    while len(engine.loads) == num_loads:
        loop.step()
    return place(engine)


def finish(loop: HostLoop) -> None:
    for _ in loop.run_until_idle():
        pass
    loop.check_integrity()


def test_requests_of_which_nothing_is_cached_go_where_fewest_run() -> None:
    loop, engine = make_loop(num_slots=9, num_replicas=3)
    places = [start(loop, engine, str(number), [number + 1] * 9, LONG) for number in range(9)]
    assert sorted(places[:3]) == sorted(places[3:6]) == sorted(places[6:]) == [0, 1, 2]
    finish(loop)


def test_a_request_goes_to_the_replica_that_has_most_of_its_text() -> None:
    loop, engine = make_loop()
    home = start(loop, engine, "first", TEXT, SHORT)
    finish(loop)
    # Where more run, as long as it is not far more.
    for number in range(3):
        assert start(loop, engine, f"more {number}", [*TEXT, number], LONG) == home
        assert engine.loads[-1].num_computed == len(TEXT)
    assert start(loop, engine, "another", [9, 9, 9], LONG) != home
    assert start(loop, engine, "again", [*TEXT, 9], LONG) == home
    finish(loop)


def test_no_replica_is_crowded_for_what_it_has() -> None:
    loop, engine = make_loop(num_slots=32)
    home = start(loop, engine, "first", TEXT, SHORT)
    finish(loop)
    places = [start(loop, engine, str(number), [*TEXT, number], LONG) for number in range(12)]
    assert places[:5] == [home] * 5
    assert places.count(1 - home) >= 3
    finish(loop)


def test_samples_start_on_their_prompt_only_where_it_lies() -> None:
    loop, engine = make_loop(num_slots=4)
    loop.add("four", TEXT, SamplingParams(n=4, seed=1, max_tokens=30, ignore_eos=True))
    finish(loop)
    stride = 2
    home = engine.loads[0].slot // stride
    for load in engine.loads[1:]:
        assert (load.num_computed > 0) == (load.slot // stride == home)
    assert {load.slot // stride for load in engine.loads} == {0, 1}


def test_a_replica_without_pages_preempts_while_another_goes_on() -> None:
    limits = make_limits(num_slots=4, num_pages=(13,), max_model_len=60, num_replicas=2)
    scheduler = Scheduler(limits, policy=SchedulerPolicy(pages_ahead=0.0))
    submissions = [submit(scheduler, str(number), 8, SamplingParams(max_tokens=35)) for number in range(4)]
    for _ in range(400):
        if not (scheduler.num_running or scheduler.num_waiting):
            break
        complete(scheduler, scheduler.plan())
    assert [one.leader.finish_reason for one in submissions] == ["length"] * 4
    assert scheduler.num_preemptions >= 2


def test_events_tell_of_a_page_as_gone_when_no_replica_has_it() -> None:
    loop, engine = make_loop(num_slots=2)
    log = loop.kv_events
    assert log is not None
    log.read(1)
    homes = [start(loop, engine, str(number), TEXT, SHORT) for number in range(2)]
    assert sorted(homes) == [0, 1]
    finish(loop)
    stored = [event for batch in log.read(1).batches for event in batch.events]
    assert all(isinstance(event, PagesStored) for event in stored)
    hashes = [page for event in stored if isinstance(event, PagesStored) for page in event.hashes]
    assert len(hashes) == 2 * len(set(hashes)) == 20
    caches = loop._scheduler.cache
    assert caches is not None
    told = log.last_sequence_number
    scope = CacheScope("tenant", "")
    caches.caches[0].clear(scope)
    log.flush()
    assert log.last_sequence_number == told
    caches.caches[1].clear(scope)
    log.flush()
    (batch,) = log.read(told + 1).batches
    removed = [page for event in batch.events if isinstance(event, PagesRemoved) for page in event.hashes]
    assert sorted(removed) == sorted(set(hashes))


def test_statistics_and_pages_are_those_of_all_replicas() -> None:
    loop, engine = make_loop(num_slots=2, num_pages=50)
    assert loop.snapshot().num_free_pages == (98,)
    for number in range(2):
        start(loop, engine, str(number), TEXT, SHORT)
    finish(loop)
    prefixes = loop.snapshot().prefixes
    assert prefixes is not None
    assert prefixes.query_tokens == 80
    assert prefixes.stored_pages == 20
    assert len(loop.snapshot_prefixes().events) == 20
    assert loop.clear_prefix_cache() == 20


@pytest.mark.parametrize("order", ["fcfs", "longest-prefix"])
def test_other_orders_have_replicas_too(order: str) -> None:
    limits = make_limits(num_slots=4, num_pages=(40,), num_replicas=2)
    engine = FakeReplicas(limits)
    loop = HostLoop(engine, cache=IDENTITY, policy=SchedulerPolicy(order=order))  # type: ignore[arg-type]
    for number in range(9):
        loop.add(str(number), TEXT[: 4 * number + 1], SHORT)
    finish(loop)
    assert {load.slot // 2 for load in engine.loads} == {0, 1}
