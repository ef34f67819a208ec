"""The door: what is let in, and what is refused with which reason, number and delay."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduling.answer_lengths import AnswerLengths
from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.drain import DrainRate
from jaxserve.scheduling.overload import AdmissionGate, OverloadError, Ticket
from jaxserve.scheduling.terms import ServiceTerms

PATIENT = {"classes": {"default": {"max_predicted_wait": 60.0}}}


class Door:
    """A gate on a clock that is moved by hand."""

    def __init__(self, settings: dict[str, Any] | None = None, **pool: int) -> None:
        policy = SchedulerPolicy.from_mapping(settings or {})
        self.gate = AdmissionGate(policy, **({"num_slots": 2, "num_pages": 1000, "page_size": 16} | pool))
        self.now = 0.0

    def admit(
        self, tenant: str = "", *, prompt: int = 10, max_tokens: int = 10, num_samples: int = 1, **terms: Any
    ) -> Ticket:
        return self.gate.admit(
            ServiceTerms(tenant=tenant, **terms), prompt, max_tokens, self.now, num_samples=num_samples
        )

    def knock(self, tenant: str = "", **request: Any) -> Ticket | OverloadError:
        try:
            return self.admit(tenant, **request)
        except OverloadError as error:
            return error

    def refused(self, tenant: str = "", **request: Any) -> OverloadError:
        with pytest.raises(OverloadError) as caught:
            self.admit(tenant, **request)
        return caught.value

    def serve(self, count: int, seconds: float, *, num_output: int = 10, **terms: Any) -> None:
        """Answers one after another on one slot, so many seconds each, with others always waiting."""
        crowd = [self.admit(**terms) for _ in range(4)]
        for ticket in crowd[:2]:
            ticket.start(self.now)
        for _ in range(count):
            self.now += seconds
            crowd.pop(0).release(self.now, num_output)
            crowd[1].start(self.now)
            crowd.append(self.admit(**terms))
        for ticket in crowd:
            ticket.release(self.now)


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


def test_delays_come_from_the_measured_rate_one_after_another() -> None:
    door = Door({"max_waiting": 4} | PATIENT)
    door.serve(40, 0.5)
    for _ in range(6):
        door.admit()
    delays = [door.refused().retry_after for _ in range(6)]
    assert delays == pytest.approx([2.5, 3.0, 3.5, 4.0, 4.5, 2.5], rel=0.05)


def test_a_deadline_that_will_be_missed_is_refused_once_the_rate_is_known() -> None:
    door = Door()
    for _ in range(22):
        door.admit(deadline=0.1)  # Hopeless; but who knows.
    error = door.refused(deadline=0.0)
    assert (error.reason, error.message) == ("deadline", "the deadline passed 0 seconds ago")

    door = Door(PATIENT)
    door.serve(40, 0.5)
    for _ in range(2):
        door.admit().start(door.now)
    for _ in range(10):
        door.admit(deadline=door.now + 60)
    # 10 wait, each 20 tokens, at 40 tokens a second; then an answer of a second.
    door.admit(deadline=door.now + 6.5)
    error = door.refused(deadline=door.now + 5.0)
    assert error.reason == "deadline"
    assert re.fullmatch(
        r"the answer would take [56]\.\d+ seconds, [45]\.\d+ of them in the queue; the deadline leaves 5",
        error.message,
    )
    door.admit("newcomer", deadline=door.now + 1.5)  # It has nothing ahead of it at its share.
    door.admit()


def test_a_deadline_goes_before_the_tenants_patient_requests_in_the_prediction() -> None:
    door = Door(PATIENT)
    door.serve(40, 0.5)
    for _ in range(2):
        door.admit().start(door.now)
    for _ in range(6):
        door.admit("a")
        door.admit("b")
    for _ in range(3):
        door.admit("a", deadline=door.now + 5.0)  # Three of 20 tokens at half of 40 a second.
    assert door.refused("a", deadline=door.now + 2.5).reason == "deadline"
    door.admit("b", deadline=door.now + 2.5)


@pytest.mark.parametrize(
    ("limits", "patience"),
    [
        ({"max_wait": 3.0, "ttft_target": inf}, 3.0),
        ({"ttft_target": 7.5}, 3.0),  # Of a target, the queue may take a part.
        ({"ttft_target": 7.5, "max_wait": 2.0}, 2.0),
        ({"ttft_target": 5.0, "max_predicted_wait": 4.0}, 4.0),
        ({"max_predicted_wait": 4.0, "max_wait": 2.0}, 2.0),
    ],
)
def test_nobody_is_let_in_to_wait_longer_than_the_class_allows(
    limits: dict[str, float], patience: float
) -> None:
    door = Door({"classes": {"default": {"max_waiting": 1000} | limits}})
    door.serve(40, 0.5)
    answers = [door.knock() for _ in range(30)]
    num_admitted = sum(isinstance(answer, Ticket) for answer in answers)
    assert num_admitted == pytest.approx(2 + 2 * patience, abs=2)  # Two slots, and two starts a second.
    error = door.refused()
    assert error.reason == "queue_full"
    assert re.fullmatch(
        rf"a request of class 'default' would wait {patience:.0f}\.\d+ seconds; the limit is {patience:.0f}",
        error.message,
    )


def test_whoever_waits_though_slots_are_free_shows_that_something_else_is_short() -> None:
    door = Door({"max_waiting": 3, "classes": {"default": {"ttft_target": 7.5}}}, num_slots=100)
    tickets = [door.admit() for _ in range(4)]
    door.now = 0.2  # A step or two may pass before anybody could have started.
    tickets.append(door.admit())
    door.now = 0.3
    assert door.refused().message == "5 requests wait already; the limit is 3"
    for ticket in tickets[:4]:
        ticket.start(door.now)
    door.now = 3.5
    error = door.refused()
    assert error.message == "a request of class 'default' would wait 3.3 seconds; the limit is 3"
    door.admit("newcomer")  # What another tenant's first has waited for may not be what it waits for.
    tickets[4].start(door.now)
    door.admit()


def test_before_a_class_has_a_rate_of_its_own_it_has_its_share_of_everybodys() -> None:
    door = Door({"classes": {"interactive": {"max_waiting": 1000}}})
    door.serve(8, 0.25, priority="batch")  # Too few to be sure, and none of the others.
    crowd = [door.admit(priority="batch") for _ in range(2)]
    for ticket in crowd:
        ticket.start(door.now)
    door.admit(priority="batch")
    answers = [door.knock(priority="interactive") for _ in range(10)]
    num_admitted = sum(isinstance(answer, Ticket) for answer in answers)
    # Eight ninths of four a second, for 0.4 seconds; the first finds nobody ahead.
    assert num_admitted == 2


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


def test_the_drain_rate_counts_only_seconds_of_backlog() -> None:
    drain = DrainRate()
    now = 0.0
    drain.advance(now, backlog=False)
    assert drain.requests_per_second == 0.0
    for _ in range(200):
        now += 0.25
        drain.advance(now, backlog=True)
        drain.start(1, 30)
        now += 5.0
        drain.advance(now, backlog=False)
    assert drain.requests_per_second == pytest.approx(4.0, rel=0.02)
    assert drain.tokens_per_second == pytest.approx(120.0, rel=0.02)
    for _ in range(400):  # The engine has become slower.
        now += 1.0
        drain.advance(now, backlog=True)
        drain.start(1, 30)
    assert drain.requests_per_second == pytest.approx(1.0, rel=0.05)
    rate = drain.requests_per_second
    drain.advance(now - 1000.0, backlog=True)
    assert drain.requests_per_second == rate, "a clock that goes back teaches nothing"


def test_slow_answers_suffice_for_confidence() -> None:
    drain = DrainRate()
    for step in range(20):
        drain.advance(10.0 * step, backlog=True)
        drain.start(1, 500)
        assert drain.confident == (step >= 15)


def test_answer_lengths_are_learnt_from_a_prior() -> None:
    policy = SchedulerPolicy()
    lengths = AnswerLengths(policy)
    assert lengths.mean(1, 10_000) == 256
    assert lengths.mean(1, 50) == 50
    assert lengths.quantile(1, 0.9, 10_000) == 256
    for number in range(1000):
        lengths.observe(1, 10 + number % 100)
    assert lengths.mean(1, 10_000) == pytest.approx(60, abs=10)
    assert lengths.quantile(1, 0.9, 10_000) == pytest.approx(100, abs=3)
    assert lengths.quantile(1, 1.0, 50) == 50
    assert lengths.mean(0, 10_000) == 256, "each class has its own"
    with pytest.raises(ValueError, match="quantile 0 is out of range"):
        lengths.quantile(1, 0, 10)


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
