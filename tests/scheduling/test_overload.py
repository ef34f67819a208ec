"""The door: what is let in, and what is refused with which reason, number and delay."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.overload import AdmissionGate, OverloadError, Ticket
from jaxserve.scheduling.terms import ServiceTerms
from tests.scheduling.door import Door


def test_so_many_may_wait_beyond_the_slots() -> None:
    door = Door({"max_waiting": 3})
    tickets = [door.admit() for _ in range(5)]
    error = door.refused()
    assert (error.reason, error.message) == ("queue_full", "3 requests wait already; the limit is 3")
    assert error.retry_after == 1.0, "nothing has been measured"
    tickets[0].start(0.0)  # Whether the gate is told of starts or not changes nothing in the sum.
    assert door.refused().reason == "queue_full"
    tickets[4].release(0.0)
    tickets[4].release(0.0)
    door.admit()
    assert door.refused().reason == "queue_full"
    assert door.gate.num_refused == {"queue_full": 3}


def test_none_may_wait_and_yet_the_slots_fill() -> None:
    door = Door({"max_waiting": 0})
    tickets = [door.admit(), door.admit()]
    assert door.refused().message == "0 requests wait already; the limit is 0"
    tickets[0].start(0.0)
    tickets[0].release(1.0, 5)
    door.admit()


def test_each_class_has_its_own_queue() -> None:
    door = Door({"classes": {"interactive": {"max_waiting": 1}, "batch": {"max_waiting": 2}}})
    for ticket in [door.admit(priority="batch") for _ in range(2)]:
        ticket.start(0.0)
    door.admit(priority="interactive")
    error = door.refused(priority="interactive")
    assert error.message == "1 requests of class 'interactive' wait already; the limit is 1"
    for _ in range(2):
        door.admit(priority="batch")
    assert door.refused(priority="batch").reason == "queue_full"
    loads = {load.name: load for load in door.gate.loads()}
    assert (loads["batch"].num_waiting, loads["batch"].num_running) == (2, 2)
    assert (loads["interactive"].num_waiting, loads["interactive"].num_waiting_tokens) == (1, 20)
    assert loads["interactive"].num_waiting_pages == 2


def test_a_flood_does_not_shut_out_the_other_tenants() -> None:
    door = Door({"classes": {"default": {"max_waiting": 10}}})
    for _ in range(12):
        door.admit("flood")
    assert door.refused("flood").reason == "queue_full"
    for _ in range(5):
        door.admit("light")
    assert door.refused("light").reason == "queue_full", "half of the limit is its share of two"
    for _ in range(3):
        door.admit("third")
    assert door.refused("third").reason == "queue_full"


def test_no_number_of_tenants_doubles_the_limit() -> None:
    door = Door({"classes": {"default": {"max_waiting": 10}}})
    for _ in range(12):
        door.admit("flood")
    answers = [door.knock(f"tenant {number}") for number in range(100)]
    assert isinstance(answers[0], Ticket)
    assert isinstance(answers[-1], OverloadError)
    assert door.gate.loads()[1].num_waiting <= 2 + 20


@pytest.mark.parametrize(
    ("limits", "request_", "reason", "message"),
    [
        (
            {"max_waiting_tokens": 50},
            {"prompt": 31},
            "tokens",
            "20 tokens of class 'default' wait already and the request needs 41; the limit is 50",
        ),
        (
            {"max_waiting_pools": 0.5},
            {"prompt": 60},
            "kv",
            "requests of class 'default' that wait already are predicted to need 2 pages and this one 5; "
            "the limit is 6",
        ),
    ],
)
def test_queues_are_bounded_in_tokens_and_pages_too(
    limits: dict[str, float], request_: dict[str, Any], reason: str, message: str
) -> None:
    door = Door({"classes": {"default": limits}}, num_pages=12)
    large = door.admit(prompt=1000)  # Nobody waits before it: nothing is gained by refusing it.
    large.start(0.0)
    door.admit()
    error = door.refused(**request_)
    assert (error.reason, error.message) == (reason, message)
    door.admit(prompt=20)


def test_a_tenants_open_requests_and_waiting_tokens_are_bounded() -> None:
    door = Door({"tenants": {"acme": {"max_open": 2}, "coyote": {"max_waiting_tokens": 50}}})
    ticket = door.admit("acme")
    error = door.refused("acme", num_samples=2)
    assert error.reason == "tenant_quota"
    assert error.message == "tenant 'acme' has 1 requests open and asks for 2 more; its limit is 2"
    door.admit("acme")
    assert door.refused("acme").reason == "tenant_quota"
    ticket.start(0.0)
    ticket.release(0.0)
    door.admit("acme")
    door.admit("anybody")

    door.admit("coyote", prompt=30)
    error = door.refused("coyote", prompt=1)
    assert error.reason == "tenant_quota"
    assert error.message == "tenant 'coyote' has 40 tokens waiting and asks for 11 more; its limit is 50"


def test_a_tenants_rate_is_a_bucket_that_refills() -> None:
    door = Door({"tenants": {"acme": {"tokens_per_second": 10, "burst": 10}}}, num_slots=100)
    first = door.admit("acme", prompt=50)  # 60 of 100 tokens.
    first.start(0.0)
    error = door.refused("acme", prompt=50)
    assert error.reason == "rate"
    assert error.message == (
        "tenant 'acme' asks for 60 tokens and may use 40 now; its limit is 10 tokens a second"
    )
    assert error.retry_after == pytest.approx(2.0)
    door.now = 2.0
    door.admit("acme", prompt=50).start(2.0)
    first.release(2.0, num_output=4)  # It had 10 predicted and used 4.
    assert door.refused("acme", prompt=50).retry_after == pytest.approx(5.4)
    door.now = 12.0
    door.admit("acme", prompt=5000).start(
        12.0
    )  # On a full burst whatever its size; then the debt is paid off.
    assert door.refused("acme", prompt=1).retry_after == 60.0
    door.admit("other", prompt=5000)


def test_retries_have_a_budget_while_others_wait() -> None:
    classes = {"retry": {"max_predicted_wait": 60.0}}
    door = Door({"retries": {"ratio": 0.2, "window": 10, "at_least": 1}, "classes": classes})
    for _ in range(20):
        door.admit()
    for _ in range(4):
        door.admit(is_retry=True)
    error = door.refused(is_retry=True)
    assert error.reason == "retry_budget"
    assert error.message == (
        "4 retries were let in within 10 seconds; the limit is 4, 20% of the first tries and at least 1"
    )
    door.now = 60.0  # The first tries of long ago give no budget; one is always there.
    door.admit(is_retry=True)
    assert door.refused(is_retry=True).reason == "retry_budget"


def test_a_retry_for_which_there_is_a_slot_costs_nobody_anything() -> None:
    door = Door({"retries": {"ratio": 0, "at_least": 0}})
    door.admit(is_retry=True).start(0.0)
    door.admit(is_retry=True).start(0.0)
    assert door.refused(is_retry=True).reason == "retry_budget"


def test_a_refusal_leaves_nothing_behind() -> None:
    door = Door({"max_waiting": 1, "tenants": {"acme": {"tokens_per_second": 1000, "max_open": 5}}})
    tickets = [door.admit("acme") for _ in range(3)]
    before = door.gate.loads()
    for _ in range(50):
        assert door.refused("acme").reason == "queue_full"
    assert door.gate.loads() == before
    for ticket in tickets:
        ticket.release(0.0)
    assert all(load.num_waiting == load.num_running == 0 for load in door.gate.loads())
    for _ in range(3):
        door.admit("acme")


def test_many_tenants_come_and_go() -> None:
    door = Door({"other_tenants": {"tokens_per_second": 1e6}}, num_slots=10)
    for number in range(20_000):
        door.now += 0.01
        door.admit(f"tenant {number}").release(door.now)
    tickets = [door.admit(f"tenant {number}") for number in range(3)]
    assert len(tickets) == 3


def test_the_gate_is_safe_between_threads() -> None:
    door = Door({"max_waiting": 50}, num_slots=4)
    refused: list[OverloadError] = []

    def client(number: int) -> None:
        for _ in range(200):
            ticket = door.knock(f"tenant {number}")
            if isinstance(ticket, OverloadError):
                refused.append(ticket)
                continue
            ticket.start(0.0)
            ticket.release(0.0, 3)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not refused
    assert all(load.num_waiting == load.num_running == 0 for load in door.gate.loads())


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from("aaasr"), st.integers(0, 30), st.sampled_from(["x", "y", "z"]), st.integers(1, 3)
    ),
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_counts_are_exact_and_bounded(actions: list[tuple[str, int, str, int]]) -> None:
    settings = {"max_waiting": 5, "max_predicted_wait": 60.0}
    door = Door({"classes": {"default": settings}}, num_slots=3)
    waiting: list[Ticket] = []
    running: list[Ticket] = []
    for kind, number, tenant, num_samples in actions:
        door.now += 0.1
        if kind == "a":
            answer = door.knock(tenant, prompt=number + 1, num_samples=num_samples)
            if isinstance(answer, Ticket):
                waiting.append(answer)
            else:
                assert answer.reason == "queue_full"
                assert sum(ticket.demand.num_requests for ticket in waiting) >= 5
        elif kind == "s" and waiting:
            ticket = waiting.pop(number % len(waiting))
            ticket.start(door.now)
            running.append(ticket)
        elif kind == "r" and (waiting or running):
            pool = running if running and (number % 2 or not waiting) else waiting
            pool.pop(number % len(pool)).release(door.now, number)
        load = door.gate.loads()[1]
        assert load.num_waiting == sum(ticket.demand.num_requests for ticket in waiting)
        assert load.num_running == sum(ticket.demand.num_requests for ticket in running)
        assert load.num_waiting_tokens == pytest.approx(sum(ticket.demand.num_tokens for ticket in waiting))


def test_bad_sizes_and_priorities_are_named() -> None:
    with pytest.raises(ValueError, match="num_pages 0 is below 1"):
        Door(num_pages=0)
    with pytest.raises(ValueError, match="priority 'urgent' is not a class"):
        Door().admit(priority="urgent")


def test_a_policy_may_bound_the_whole_queue_at_the_command_line() -> None:
    policy = replace(SchedulerPolicy(), max_waiting=7)
    gate = AdmissionGate(policy, num_slots=1, num_pages=10, page_size=16)
    for _ in range(8):
        gate.admit(ServiceTerms(), 1, 1, 0.0)
    with pytest.raises(OverloadError, match="7 requests wait already; the limit is 7"):
        gate.admit(ServiceTerms(), 1, 1, 0.0)
