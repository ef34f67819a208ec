"""What the door foresees: waits, deadlines and lengths of answers, learnt from what it has measured."""

from __future__ import annotations

import re
from math import inf

import pytest

from jaxserve.scheduling.answer_lengths import AnswerLengths
from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.drain import DrainRate
from jaxserve.scheduling.overload import Ticket
from tests.scheduling.door import Door

PATIENT = {"classes": {"default": {"max_predicted_wait": 60.0}}}


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


def test_a_burst_may_use_up_more_of_the_target_than_a_queue_that_stands() -> None:
    door = Door({"classes": {"default": {"max_waiting": 1000, "ttft_target": 7.5}}})
    door.serve(40, 0.5)

    def num_admitted() -> int:
        answers = [door.knock() for _ in range(30)]
        tickets = [answer for answer in answers if isinstance(answer, Ticket)]
        for ticket in tickets:
            ticket.release(door.now)
        return len(tickets)

    standing = num_admitted()
    assert standing == pytest.approx(2 + 2 * 3.0, abs=2)  # Two slots, and two starts a second.
    door.now += 60.0  # In which nobody came.
    assert num_admitted() == pytest.approx(2 + 2 * 6.0, abs=2)
    door.serve(100, 0.5)
    assert num_admitted() == standing


def test_a_limit_that_was_given_holds_in_a_burst_too() -> None:
    door = Door({"classes": {"default": {"ttft_target": 7.5, "max_predicted_wait": 3.0}}})
    door.serve(40, 0.5)
    door.now += 60.0
    while isinstance(answer := door.knock(), Ticket):
        pass
    assert answer.message.endswith("; the limit is 3")


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
