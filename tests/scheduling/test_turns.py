"""Whose turn it is, where groups decode one after another in a pipeline."""

from __future__ import annotations

from jaxserve.plan import SamplingParams
from jaxserve.scheduling import RequestState, ScheduledStep, Scheduler
from tests.fake_limits import make_limits
from tests.scheduling.test_scheduler import complete, submit

LONG = SamplingParams(max_tokens=100, ignore_eos=True)


def running(num_requests: int, decode_groups: int) -> Scheduler:
    """Requests that have computed their prompts, with nothing in flight."""
    scheduler = Scheduler(make_limits(num_slots=12, decode_groups=decode_groups))
    for number in range(num_requests):
        submit(scheduler, str(number), 1, LONG)
    complete(scheduler, scheduler.plan())
    return scheduler


def ticks(scheduler: Scheduler, number: int) -> list[set[int]]:
    """The slots of steps that only decode, the oldest in flight being collected when there are as many others
    as groups."""
    found: list[set[int]] = []
    in_flight: list[ScheduledStep] = []
    for _ in range(number):
        step = scheduler.plan()
        assert step is not None
        assert step.plan.shape.decode
        in_flight.append(step)
        found.append(set(step.plan.slots.tolist()))
        if len(in_flight) > scheduler.limits.decode_groups:
            complete(scheduler, in_flight.pop(0))
    for step in in_flight:
        complete(scheduler, step)
    return found


def test_groups_are_even_and_take_turns() -> None:
    found = ticks(running(10, 4), 12)
    assert [len(slots) for slots in found] == [3, 3, 2, 2] * 3
    for first in range(9):
        assert len(set[int]().union(*found[first : first + 4])) == 10


def test_groups_become_even_again_when_answers_end() -> None:
    scheduler = running(12, 3)
    first = ticks(scheduler, 3)
    for request in scheduler.running:
        if request.slot in first[1] | first[2] and request.slot not in (min(first[1]), min(first[2])):
            scheduler.finish(request, RequestState.ABORTED)
    found = ticks(scheduler, 9)
    assert [len(slots) for slots in found] == [2] * 9
    for start in range(7):
        assert len(set[int]().union(*found[start : start + 3])) == 6


def test_nobody_enters_who_has_not_left() -> None:
    scheduler = running(1, 3)
    step = scheduler.plan()
    assert scheduler.plan() is None
    assert scheduler.num_under_way == 1
    complete(scheduler, step)
    assert scheduler.num_under_way == 0
    assert complete(scheduler, scheduler.plan()).rows == {"0": 1}


def test_a_prompt_has_everybody_leave_and_everybody_in_its_step() -> None:
    scheduler = running(6, 2)
    under_way = [scheduler.plan(), scheduler.plan()]
    assert scheduler.num_under_way == 1
    submit(scheduler, "prompt", 9, LONG)
    mixed = scheduler.plan()
    assert scheduler.num_under_way == 0
    assert mixed is not None
    assert not mixed.plan.shape.decode
    for step in under_way:
        assert len(complete(scheduler, step).rows) == 3
    assert len(complete(scheduler, mixed).rows) == 7
    assert [len(slots) for slots in ticks(scheduler, 4)] == [4, 3, 4, 3]
