"""Who goes next: each rule of the queue alone, and the comparison orders."""

from __future__ import annotations

import random
import time
from collections import Counter

import numpy as np
import pytest

from jaxserve.scheduling.classes import PriorityClass, SchedulerPolicy
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request, RequestState
from tests.scheduling.waiting_requests import make_request, preempt, start_next

FAIR = SchedulerPolicy()
NO_FLOORS = SchedulerPolicy(
    classes=(
        PriorityClass(name="interactive", rank=0, share=8, max_wait=10),
        PriorityClass(name="default", rank=1, share=4, max_wait=60),
        PriorityClass(name="batch", rank=3, share=1, max_wait=3600),
    )
)


def push_all(queue: RequestQueue, *requests: Request, now: float = 0.0) -> None:
    for request in requests:
        queue.push(request, now)


def drain(queue: RequestQueue, now: float = 0.0) -> list[Request]:
    """Start everything, one slot after another."""
    started: list[Request] = []
    while (request := start_next(queue, now)) is not None:
        started.append(request)
        queue.leave(request)
    return started


def test_one_class_and_one_tenant_is_first_come_first_served() -> None:
    queue = RequestQueue(FAIR)
    requests = [make_request() for _ in range(5)]
    push_all(queue, *reversed(requests))
    assert drain(queue) == requests
    assert queue.peek(0.0) is None


def test_the_earliest_deadline_goes_first_and_none_is_the_latest() -> None:
    queue = RequestQueue(FAIR)
    none, late, early, equal = (make_request(deadline=deadline) for deadline in (None, 9.0, 5.0, 5.0))
    push_all(queue, none, late, early, equal)
    assert drain(queue) == [early, equal, late, none]


def test_expired_requests_are_handed_over_once_and_never_chosen() -> None:
    queue = RequestQueue(FAIR)
    soon, late, none = (make_request(deadline=deadline) for deadline in (5.0, 9.0, None))
    push_all(queue, soon, late, none)
    assert queue.expire(4.9) == []
    assert queue.peek(4.9) is soon
    assert queue.peek(5.0) is late
    assert len(queue) == 3, "it waits until somebody ends it"
    assert soon.queued
    assert queue.expire(5.0) == [soon]
    assert queue.expire(5.0) == []
    assert not soon.queued
    assert len(queue) == 2
    queue.peek(10.0)
    queue.remove(late)  # Its caller has gone before the expired ones were asked for.
    assert queue.expire(10.0) == []
    assert queue.peek(10.0) is none


def test_preempted_requests_return_before_the_new_ones_of_their_class() -> None:
    queue = RequestQueue(NO_FLOORS)
    first, second = make_request(prompt_len=1), make_request(prompt_len=1)
    push_all(queue, first, second)
    assert [start_next(queue), start_next(queue)] == [first, second]
    urgent = make_request(deadline=1.0)
    chat = make_request(priority="interactive")
    push_all(queue, urgent, chat)
    preempt(queue, second)
    preempt(queue, first)
    assert drain(queue) == [chat, first, second, urgent]


def test_who_returns_is_charged_its_prompt_once() -> None:
    queue = RequestQueue(FAIR)
    request = make_request("a", prompt_len=100)
    queue.push(request, 0.0)
    account = queue.start(queue.peek(0.0) or request, num_cached=40)
    assert queue.accounts.counter(account) == 60
    request.advance(type(request.state).RUNNING)
    preempt(queue, request)
    assert queue.start(request) == account
    assert queue.accounts.counter(account) == 60


def test_tenants_take_turns_by_what_they_were_served() -> None:
    queue = RequestQueue(FAIR)
    flood = [make_request("flood", prompt_len=100) for _ in range(6)]
    push_all(queue, *flood)
    assert start_next(queue) is flood[0]
    light = [make_request("light", prompt_len=50) for _ in range(4)]
    push_all(queue, *light)
    # Light comes level with flood (100); each start adds the prompt.
    order = drain(queue)
    assert order[:6] == [flood[1], light[0], light[1], flood[2], light[2], light[3]]


def test_output_counts_double_and_weights_divide() -> None:
    policy = SchedulerPolicy.from_mapping({"tenants": {"b": {"weight": 4}}})
    queue = RequestQueue(policy)
    a, b = (make_request(tenant, prompt_len=8) for tenant in "ab")
    push_all(queue, a, b, *(make_request(tenant, prompt_len=8) for tenant in "ab"))
    accounts = [queue.start(a), queue.start(b)]
    assert [queue.accounts.counter(account) for account in accounts] == [8, 2]
    queue.accounts.charge(np.array(accounts), np.array([1, 13]))
    assert [queue.accounts.counter(account) for account in accounts] == [10, 8.5]
    head = queue.peek(0.0)
    assert head is not None
    assert head.submission.terms.tenant == "b"
    queue.accounts.charge(np.array(accounts[1:]), 4)
    head = queue.peek(0.0)
    assert head is not None
    assert head.submission.terms.tenant == "a"


def test_nobody_saves_up_while_away() -> None:
    queue = RequestQueue(FAIR)
    push_all(queue, *(make_request("steady", prompt_len=100) for _ in range(30)))
    for _ in range(10):
        start_next(queue)
    push_all(queue, *(make_request("newcomer", prompt_len=100) for _ in range(30)))
    tenants = Counter(request.submission.terms.tenant for request in drain(queue)[:20])
    assert tenants == {"steady": 10, "newcomer": 10}


def test_classes_share_by_weight_and_ties_go_to_the_urgent() -> None:
    queue = RequestQueue(NO_FLOORS)
    for priority in ("batch", "default", "interactive"):
        push_all(queue, *(make_request(priority=priority, prompt_len=80) for _ in range(40)))
    order = [request.submission.terms.priority for request in drain(queue)]
    assert order[:3] == ["interactive", "default", "batch"]
    assert Counter(order[:39]) == {"interactive": 24, "default": 12, "batch": 3}


def test_an_urgent_request_does_not_wait_behind_a_patient_backlog() -> None:
    queue = RequestQueue(NO_FLOORS)
    push_all(queue, *(make_request(priority="batch", prompt_len=1000) for _ in range(50)))
    for _ in range(10):
        start_next(queue)
    chat = make_request(priority="interactive")
    queue.push(chat, 0.0)
    assert start_next(queue) is chat


def test_a_class_below_its_floor_goes_before_the_overdue() -> None:
    queue = RequestQueue(FAIR)  # Interactive has a quarter of the slots in use.
    batch = [make_request(priority="batch") for _ in range(12)]
    chats = [make_request(priority="interactive", arrival=4000.0) for _ in range(4)]
    push_all(queue, *batch)
    push_all(queue, *chats, now=4000.0)
    started = [start_next(queue, 4000.0) for _ in range(9)]
    assert started == [*batch[:3], chats[0], *batch[3:6], chats[1], batch[6]]
    queue.leave(chats[0])
    assert start_next(queue, 4000.0) is chats[2]


def test_the_overdue_go_next_longest_past_their_limit_first() -> None:
    queue = RequestQueue(NO_FLOORS)
    batch = make_request(priority="batch", arrival=0.0)  # Due at 3600.
    default = make_request(priority="default", arrival=3580.0)  # Due at 3640.
    chat = make_request(priority="interactive", arrival=3600.0)  # Due at 3610.
    push_all(queue, default, chat, batch, now=3600.0)
    assert queue.peek(3599.0) is chat
    assert queue.peek(3600.0) is batch
    assert drain(queue, 3640.0) == [batch, chat, default]


def test_a_preempted_request_waits_anew() -> None:
    queue = RequestQueue(NO_FLOORS)
    batch = make_request(priority="batch")
    queue.push(batch, 0.0)
    start_next(queue)
    preempt(queue, batch, 1000.0)
    chat = make_request(priority="interactive", arrival=4500.0)
    queue.push(chat, 4500.0)
    assert queue.peek(4599.0) is chat, "both are due by then only at 4510 and 4600"
    assert queue.peek(4600.0) is chat
    queue.remove(chat)
    assert queue.peek(4600.0) is batch


def test_lengths_by_class_and_tenant() -> None:
    queue = RequestQueue(FAIR)
    a, b, c = make_request("x"), make_request("x", "batch"), make_request("y")
    push_all(queue, a, b, c)
    assert (len(queue), queue.num_waiting(1), queue.num_waiting(3)) == (3, 2, 1)
    assert (queue.num_waiting_of("x"), queue.num_waiting_of("y"), queue.num_waiting_of("z")) == (2, 1, 0)
    queue.remove(a)
    queue.start(c)
    assert (len(queue), queue.num_waiting(1), queue.num_running(1)) == (1, 0, 1)
    assert (queue.num_waiting_of("x"), queue.num_waiting_of("y")) == (1, 0)
    assert [request in queue for request in (a, b, c)] == [False, True, False]
    assert [request.queued for request in (a, b, c)] == [False, True, False]
    assert (queue.class_index(b), queue.class_index(c)) == (3, 1)
    queue.leave(c)
    assert queue.num_running(1) == 0


def test_a_request_without_room_is_passed_a_few_times_only() -> None:
    queue = RequestQueue(SchedulerPolicy(max_passed=3))
    large = make_request(prompt_len=1000)
    small = [make_request() for _ in range(8)]
    push_all(queue, large, *small)
    queue.begin_round()
    assert queue.peek(0.0) is large
    assert queue.set_aside(large, 0.0)
    assert [start_next(queue), start_next(queue)] == small[:2]
    queue.begin_round()
    assert queue.peek(0.0) is large, "the next round asks again"
    assert queue.set_aside(large, 0.0)
    assert start_next(queue) is small[2]
    assert start_next(queue) is None, "three have passed it"
    queue.begin_round()
    assert queue.peek(0.0) is large
    assert not queue.set_aside(large, 0.0)
    assert len(queue) == 6
    queue.remove(large)
    assert queue.peek(0.0) is small[3]


def test_an_overdue_request_is_passed_by_nobody() -> None:
    queue = RequestQueue(FAIR)
    large, small = make_request(prompt_len=1000), make_request()
    push_all(queue, large, small)
    assert not queue.set_aside(large, 60.0)
    assert queue.peek(60.0) is large
    assert queue.set_aside(large, 59.0)
    queue.remove(large)  # It may end while it is set aside.
    queue.begin_round()
    assert drain(queue, 59.0) == [small]


def test_the_victim_is_the_least_urgent_then_has_the_least_to_lose() -> None:
    queue = RequestQueue(FAIR)
    work = [("interactive", 5), ("batch", 50), ("default", 1), ("batch", 40), ("batch", 40)]
    requests = [make_request(priority=priority) for priority, _ in work]
    computed = {request: num_computed for request, (_, num_computed) in zip(requests, work, strict=True)}
    push_all(queue, *requests)
    for request in requests:
        queue.start(request)
        request.num_admissions = 1

    def victims() -> list[int]:
        order = sorted(requests, key=lambda request: queue.victim_key(request, computed[request]))
        return [requests.index(request) for request in order]

    assert victims() == [4, 3, 1, 2, 0]
    requests[4].num_admissions = 5  # It has been a victim four times.
    assert victims() == [3, 1, 2, 0, 4]


def test_floors_and_ranks_are_told() -> None:
    queue = RequestQueue(FAIR)
    push_all(queue, *(make_request(priority="default") for _ in range(8)))
    for _ in range(8):
        start_next(queue)
    chats, batch = [make_request(priority="interactive") for _ in range(3)], make_request(priority="batch")
    push_all(queue, *chats, batch)
    assert queue.below_floor(chats[2])
    assert not queue.below_floor(batch), "a sixteenth of eight slots is none"
    start_next(queue)
    assert queue.below_floor(chats[2]), "a quarter of nine is two"
    start_next(queue)
    assert not queue.below_floor(chats[2])
    assert (queue.priority_class(chats[0]).rank, queue.priority_class(batch).rank) == (0, 3)
    assert queue.precedes(chats[0], batch)
    assert not queue.precedes(batch, chats[0])
    assert not queue.precedes(chats[0], chats[1])


def test_an_answer_is_paid_for_as_it_starts_and_settled_as_it_ends() -> None:
    queue = RequestQueue(FAIR)
    short, long, cut_off, next_one = (make_request("a", prompt_len=10, max_tokens=1000) for _ in range(4))
    push_all(queue, short, long, cut_off, next_one)
    for request in (short, long, cut_off):
        account = queue.start(request)
        assert queue.prepay(request) == 256, "as the class expects"
        request.advance(RequestState.RUNNING)
    paid = 3 * (10 + 2 * 256)
    assert queue.accounts.counter(account) == paid

    preempt(queue, long)
    queue.start(long)
    assert queue.prepay(long) == 256
    assert queue.accounts.counter(account) == paid, "once"

    for request, num_output, end in (
        (short, 6, RequestState.STOPPED),
        (long, 300, RequestState.STOPPED),
        (cut_off, 0, RequestState.ABORTED),
    ):
        request.output = [0] * num_output
        request.advance(end)
        queue.settle(request)
        queue.leave(request)
    assert queue.accounts.counter(account) == paid, "a counter never goes down"
    queue.start(next_one)
    assert queue.accounts.counter(account) == paid
    expected = queue.prepay(next_one)
    assert 225 <= expected <= 246, "learnt from the two that came to their end"
    unused = 250 + 256
    assert queue.accounts.counter(account) == paid + max(0, 10 + 2 * expected - 2 * unused)
    assert queue.accounts.counter(1) == paid / 4, "as for the class"


def test_first_come_order_knows_only_arrival() -> None:
    queue = RequestQueue(SchedulerPolicy.first_come())
    requests = [
        make_request("a", "batch"),
        make_request("b", "interactive", deadline=9.0),
        make_request("a", "default", deadline=3.0),
        make_request("b", "interactive"),
    ]
    push_all(queue, *reversed(requests))
    assert queue.expire(3.0) == [requests[2]]
    assert start_next(queue) is requests[0]
    preempt(queue, requests[0])
    assert not queue.set_aside(requests[0], 0.0)
    assert max(requests, key=lambda request: queue.victim_key(request, 0)) is requests[0]
    assert not queue.below_floor(requests[1])
    assert not queue.precedes(requests[1], requests[0])
    assert drain(queue) == [requests[0], requests[1], requests[3]]


def test_longest_prefix_order_serves_the_cache() -> None:
    cached: dict[Request, int] = {}
    queue = RequestQueue(SchedulerPolicy.longest_prefix(), score=lambda request: cached.get(request, 0))
    requests = [make_request() for _ in range(4)]
    push_all(queue, *requests)
    cached[requests[2]] = 8
    assert start_next(queue) is requests[2]
    cached[requests[3]] = cached[requests[1]] = 4
    assert start_next(queue) is requests[1]
    preempt(queue, requests[2])
    queue.remove(requests[0])
    assert drain(queue) == [requests[2], requests[3]]
    with pytest.raises(ValueError, match="needs a score"):
        RequestQueue(SchedulerPolicy.longest_prefix())


def test_a_request_of_no_class_is_refused_and_leaves_no_trace() -> None:
    queue = RequestQueue(FAIR)
    with pytest.raises(ValueError, match="'urgent' is not a class"):
        queue.push(make_request(priority="urgent"), 0.0)
    assert len(queue) == 0


def seconds_per_turnover(num_waiting: int) -> float:
    """The median time to expire, peek, start, charge 256, leave and push, with so many in the queue."""
    rng = random.Random(0)
    priorities = ["interactive", "default", "batch"]

    def fresh(now: float) -> Request:
        deadline = now + 1e6 + rng.random() if rng.random() < 0.5 else None
        return make_request(f"t{rng.randrange(500)}", rng.choice(priorities), arrival=now, deadline=deadline)

    queue = RequestQueue(FAIR)
    push_all(queue, *(fresh(0.0) for _ in range(num_waiting + 256)))
    running = [start_next(queue) for _ in range(256)]
    accounts = np.array(
        [queue.accounts.index(one.submission.terms.tenant, queue.class_index(one)) for one in running]
    )
    times: list[float] = []
    for step in range(400):
        now = 0.02 * step
        place = step % 256
        new, old = fresh(now), running[place]
        began = time.perf_counter()
        queue.expire(now)
        running[place] = queue.peek(now)
        accounts[place] = queue.start(running[place])
        queue.accounts.charge(accounts, 1)
        queue.leave(old)
        queue.push(new, now)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


@pytest.mark.alone
def test_a_long_queue_costs_hardly_more_than_a_short_one() -> None:
    short, long = (min(seconds_per_turnover(num) for _ in range(2)) for num in (300, 10_000))
    assert long < 4 * short + 50e-6
