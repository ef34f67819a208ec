"""The scheduler alone: order, budgets, preemption, sharing under pressure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from jaxserve.plan import SamplingParams, SlotLoad
from jaxserve.scheduling import Request, RequestState, ScheduledStep, Scheduler, ScoredRows, Submission
from tests.fake_limits import make_limits
from tests.policies import UNFORESEEN

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def submit(scheduler: Scheduler, name: str, prompt_len: int, params: SamplingParams = LONG) -> Submission:
    return scheduler.submit(name, [7] * prompt_len, params, 0)


class Done(NamedTuple):
    """A step that has run."""

    rows: dict[str, int]
    """By request name."""
    admitted: tuple[Request, ...]
    loads: tuple[SlotLoad, ...]
    scored: tuple[ScoredRows, ...]


def complete(scheduler: Scheduler, step: ScheduledStep | None) -> Done:
    """The device has run the step and sampled token 5 wherever it had to."""
    assert step is not None
    names = {request.slot: request.submission.request_id for request in scheduler.running}
    rows = {names[part.slot]: part.num_tokens for part in step.plan.sequences if part.slot in names}
    scheduler.retire(step)
    tokens = np.full(int(step.plan.num_logit_rows.sum()), 5, np.int32)
    for part in step.rounds(tokens):
        for request, _, _, end in zip(*scheduler.commit(part, tokens), strict=True):
            if end is not None:
                scheduler.finish(request, end)
    scheduler.check_integrity()
    return Done(rows, step.admitted, step.loads, step.scored)


def states(*submissions: Submission) -> list[RequestState]:
    return [request.state for submission in submissions for request in submission.requests]


def test_first_come_first_served_within_the_budget() -> None:
    scheduler = Scheduler(make_limits(num_slots=4, num_pages=(400,)), max_chunk=16)
    for name, prompt_len in [("a", 10), ("b", 20), ("c", 3)]:
        submit(scheduler, name, prompt_len)
    shapes = [complete(scheduler, scheduler.plan()).rows for _ in range(4)]
    assert shapes == [
        {"a": 10, "b": 6},
        {"a": 1, "b": 14, "c": 1},
        {"a": 1, "b": 1, "c": 2},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_a_chunk_is_cut_to_its_rung_unless_that_leaves_less_than_half() -> None:
    for num_running, rows in [(1, [1, 15]), (8, [1] * 8 + [8]), (9, [1] * 9 + [16])]:
        scheduler = Scheduler(make_limits(num_slots=12, num_pages=(400,)), max_chunk=16)
        for number in range(num_running):
            submit(scheduler, str(number), 1)
        complete(scheduler, scheduler.plan())
        submit(scheduler, "long", 40)
        assert list(complete(scheduler, scheduler.plan()).rows.values()) == rows


def test_no_more_run_than_have_a_row_beside_a_chunk() -> None:
    scheduler = Scheduler(make_limits(num_slots=8, chunk_rows=(4,)))
    for name in "abcdef":
        submit(scheduler, name, 1)
    complete(scheduler, scheduler.plan())
    assert scheduler.num_running == 4
    assert scheduler.num_waiting == 2


def test_the_latest_arrived_is_preempted_and_comes_back_first() -> None:
    scheduler = Scheduler(make_limits(num_slots=3, num_pages=(13,)), policy=UNFORESEEN)
    a, b, c = (submit(scheduler, name, 8, SamplingParams(max_tokens=40, ignore_eos=True)) for name in "abc")
    d = None
    while c.leader.state is not RequestState.PREEMPTED:
        complete(scheduler, scheduler.plan())
        d = d or submit(scheduler, "d", 1, SamplingParams(max_tokens=4, ignore_eos=True))
    assert states(a, b, c) == [RequestState.RUNNING, RequestState.RUNNING, RequestState.PREEMPTED]
    assert c.leader.output
    while b.leader.state is not RequestState.PREEMPTED:
        complete(scheduler, scheduler.plan())
    assert a.leader.state is RequestState.RUNNING
    while a.leader.finish_reason is None:
        complete(scheduler, scheduler.plan())
    num_output = len(b.leader.output)
    step = complete(scheduler, scheduler.plan())
    assert [request.submission for request in step.admitted][:1] == [b], "in the order of arrival again"
    assert step.loads[0].tokens == b.prompt + b.leader.output[:num_output]
    assert step.loads[0].num_computed == 0
    while scheduler.num_running or scheduler.num_waiting:
        complete(scheduler, scheduler.plan())
    assert d is not None
    assert {request.finish_reason for s in (a, b, c, d) for request in s.requests} == {"length"}


def test_a_token_under_way_at_the_preemption_is_not_lost() -> None:
    scheduler = Scheduler(make_limits(num_slots=2, num_pages=(6,)), policy=UNFORESEEN)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    submissions = [submit(scheduler, name, 4, params) for name in "ab"]
    in_flight = [scheduler.plan()]
    seen_pending = False
    for _ in range(200):
        step = scheduler.plan()
        b = submissions[1].leader
        seen_pending |= b.state is RequestState.PREEMPTED and b.num_pending == 1
        in_flight += [step] if step else []
        if not in_flight:
            break
        complete(scheduler, in_flight.pop(0))
    assert seen_pending
    assert [len(s.leader.output) for s in submissions] == [10, 10]


def test_pages_under_pressure_take_the_shared_prompt_first_and_samples_recompute() -> None:
    scheduler = Scheduler(make_limits(num_slots=1, num_pages=(8,)))
    group = submit(scheduler, "g", 9, SamplingParams(n=2, max_tokens=2, ignore_eos=True))
    step = complete(scheduler, scheduler.plan())
    assert step.loads[0].num_computed == 0
    complete(scheduler, scheduler.plan())
    assert group.leader.finish_reason == "length"
    step = complete(scheduler, scheduler.plan())
    assert step.loads[0].num_computed == 8, "the leader has gone; its prompt pages have not"

    scheduler = Scheduler(make_limits(num_slots=2, num_pages=(8,)), policy=UNFORESEEN)
    early = submit(scheduler, "e", 1, SamplingParams(max_tokens=27, ignore_eos=True))
    group = submit(scheduler, "g", 9, SamplingParams(n=2, max_tokens=2, ignore_eos=True))
    for _ in range(200):
        if scheduler.num_running or scheduler.num_waiting:
            complete(scheduler, scheduler.plan())
    assert [request.finish_reason for request in early.requests + group.requests] == ["length"] * 3


def test_an_answer_without_a_limit_where_all_layers_have_windows_takes_what_the_model_takes() -> None:
    limits = make_limits(num_pages=(9,), windows=(6,), max_model_len=96)
    assert (
        limits.longest_answer(90, None)
        == Scheduler(limits).max_tokens(90, SamplingParams(max_tokens=None))
        == 6
    )


def test_windowed_groups_hold_no_more_than_their_window() -> None:
    limits = make_limits(num_slots=1, num_pages=(40, 40), windows=(0, 10))
    scheduler = Scheduler(limits)
    request = submit(scheduler, "a", 20).leader
    complete(scheduler, scheduler.plan())
    while request.finish_reason is None:
        complete(scheduler, scheduler.plan())
        assert sum(page > 0 for page in request.table.pages[1]) <= 4
        assert all(request.table.pages[0])


def test_prompt_logprobs_take_only_the_logit_rows_that_others_leave() -> None:
    limits = make_limits(num_slots=4, num_pages=(400,))
    scheduler = Scheduler(limits)
    for name in "ab":
        submit(scheduler, name, 2)
    complete(scheduler, scheduler.plan())
    scored = submit(scheduler, "s", 40, SamplingParams(max_tokens=2, prompt_logprobs=0, ignore_eos=True))
    shapes = [complete(scheduler, scheduler.plan()) for _ in range(3)]
    assert [step.rows["s"] for step in shapes] == [14, 14, 12]
    assert [step.scored[-1].num_rows for step in shapes] == [14, 14, 11]
    assert scored.leader.output == [5]


def test_steps_retire_in_order() -> None:
    scheduler = Scheduler(make_limits())
    submit(scheduler, "a", 3)
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    with pytest.raises(RuntimeError, match="order"):
        scheduler.retire(second)
    assert scheduler.num_in_flight == 2


def test_aborting_the_waiting_costs_nothing_later() -> None:
    scheduler = Scheduler(make_limits(num_slots=1))
    first = submit(scheduler, "a", 3, SamplingParams(max_tokens=3, ignore_eos=True))
    waiting: list[Request] = [submit(scheduler, str(number), 3).leader for number in range(100)]
    complete(scheduler, scheduler.plan())
    for request in waiting[:-1]:
        scheduler.finish(request, RequestState.ABORTED)
    assert scheduler.num_waiting == 1
    while first.leader.finish_reason is None:
        complete(scheduler, scheduler.plan())
    step = complete(scheduler, scheduler.plan())
    assert step.admitted == (waiting[-1],)


def test_the_queue_forgets_the_aborted_from_its_end() -> None:
    scheduler = Scheduler(make_limits(num_slots=1))
    waiting = [submit(scheduler, str(number), 3).leader for number in range(100)]
    for request in reversed(waiting[1:]):
        scheduler.finish(request, RequestState.ABORTED)
    assert complete(scheduler, scheduler.plan()).admitted == (waiting[0],)
    assert scheduler.num_waiting == 0


def test_a_prompt_preempted_halfway_is_scored_from_where_it_was() -> None:
    scheduler = Scheduler(make_limits(num_slots=2, num_pages=(10,)), max_chunk=1, policy=UNFORESEEN)
    early = submit(scheduler, "e", 1, SamplingParams(max_tokens=30, ignore_eos=True))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = submit(scheduler, "s", 20, params)
    while scored.leader.state is not RequestState.PREEMPTED:
        complete(scheduler, scheduler.plan())
    already = scored.num_scored
    assert 0 < already < 19
    rows: list[int] = []
    while scored.leader.finish_reason is None:
        step = complete(scheduler, scheduler.plan())
        rows += [part.start for part in step.scored]
    assert rows == list(range(already, 19))
    assert early.leader.finish_reason == "length"
