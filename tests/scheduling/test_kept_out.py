"""What is counted of requests that wait: what for, and what preempted ones compute again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams, StepHandle, StepResult
from jaxserve.scheduling import CacheIdentity, Scheduler, SchedulerPolicy
from jaxserve.scheduling.classes import PriorityClass
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.policies import UNFORESEEN

ENDLESS = SamplingParams(max_tokens=40, ignore_eos=True)


def planned(scheduler: Scheduler, prompt_lens: list[int], params: SamplingParams = ENDLESS) -> dict[str, int]:
    """What keeps requests out of the first step."""
    for number, prompt_len in enumerate(prompt_lens):
        scheduler.submit(str(number), [7] * prompt_len, params, 0)
    scheduler.plan()
    return {hurdle: count for hurdle, count in scheduler.num_kept_out.items() if count}


def test_nobody_is_kept_out_while_there_is_room() -> None:
    assert planned(Scheduler(make_limits(num_slots=2)), [3, 3]) == {}
    assert planned(Scheduler(make_limits(num_slots=2)), []) == {}


def test_what_the_rest_of_the_queue_waits_for() -> None:
    assert planned(Scheduler(make_limits(num_slots=2)), [3, 3, 3]) == {"slots": 1}
    assert planned(Scheduler(make_limits(num_slots=4, num_pages=(25,))), [40, 40, 40]) == {"pages": 1}
    assert planned(Scheduler(make_limits(num_slots=4), max_chunk=16), [20, 3]) == {"rows": 1}


def test_a_target_keeps_others_out_of_free_slots() -> None:
    tight = PriorityClass(name="default", tpot_target=0.01)
    scheduler = Scheduler(make_limits(num_slots=8), policy=SchedulerPolicy(classes=(tight,)))
    for _ in range(100):
        for shape in scheduler.limits.decode_shapes:
            scheduler.budget.observe(shape.rows, shape.rows, 0.004 * shape.rows)
    assert planned(scheduler, [3] * 8) == {"tpot_target": 1}
    assert 1 <= scheduler.num_running < 4


def test_a_target_that_leaves_no_rows_for_prompts_is_what_they_wait_for() -> None:
    tight = PriorityClass(name="default", tpot_target=0.02)
    scheduler = Scheduler(make_limits(num_slots=8), policy=SchedulerPolicy(classes=(tight,)))
    limits = scheduler.limits
    for _ in range(100):
        for shape in limits.decode_shapes:
            scheduler.budget.observe(shape.rows, shape.rows, 0.01)
        for shape in limits.chunk_shapes:
            scheduler.budget.observe(shape.rows, shape.rows, 1.0)
    assert planned(scheduler, [3]) == {}
    step = scheduler.plan()
    assert step is not None
    scheduler.submit("late", [7] * 3, ENDLESS, 0)
    assert scheduler.plan() is not None
    assert {hurdle: count for hurdle, count in scheduler.num_kept_out.items() if count} == {"tpot_target": 1}


def test_steps_are_counted_and_not_attempts() -> None:
    scheduler = Scheduler(make_limits(num_slots=1, num_pages=(25,)))
    assert planned(scheduler, [3, 3]) == {"slots": 1}
    for _ in range(3):
        scheduler.submit("more", [7] * 3, SamplingParams(max_tokens=1), 0)
    while scheduler.plan() is not None:
        pass
    counted = sum(scheduler.num_kept_out.values())
    assert scheduler.plan() is None, "all that its request has is in flight"
    assert sum(scheduler.num_kept_out.values()) == counted == scheduler.num_in_flight


@pytest.mark.parametrize("cached", [False, True])
def test_what_the_preempted_compute_again_is_counted(cached: bool) -> None:
    cache = CacheIdentity(model="fake", kv_format="int8") if cached else None
    engine = FakeEngine(make_limits(num_slots=3, num_pages=(13,)))
    loop = HostLoop(engine, policy=UNFORESEEN, cache=cache)
    params = replace(ENDLESS, max_tokens=20)
    for number in range(3):
        loop.add(str(number), [7 + number] * 8, params)
    list(loop.run_until_idle())
    snapshot = loop.snapshot()
    # One that comes back had computed all that it knows but the last token.
    again = [load for load in engine.loads if len(load.tokens) > 8]
    assert len(again) == snapshot.num_preemptions
    lost = sum(len(load.tokens) - 1 - load.num_computed for load in again)
    assert snapshot.num_recomputed == lost > 0


class Ticking(FakeEngine):
    """Every step takes a second."""

    now = 0.0

    def collect(self, handle: StepHandle) -> StepResult:
        self.now += 1.0
        return super().collect(handle)


def test_steps_that_only_decode_are_timed_by_their_size() -> None:
    engine = Ticking(make_limits(num_slots=4))
    loop = HostLoop(engine, overlap=False, clock=lambda: engine.now)
    for number in range(3):
        loop.add(str(number), [5, 6, 7], replace(ENDLESS, max_tokens=5))
    list(loop.run_until_idle())
    # The first token comes with the prompts; three answers take the step that is compiled for four.
    assert loop.snapshot().decode_steps == {4: (4, 4.0)}
