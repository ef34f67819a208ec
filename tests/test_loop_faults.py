"""What goes wrong around the loop harms nobody else: jumping clocks, vanished callers, closed doors."""

from __future__ import annotations

import random

import pytest

from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import AdmissionGate, CacheIdentity, OverloadError, SchedulerPolicy, ServiceTerms
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_sequence import expected_answer

LIMITS = make_limits(num_slots=4, num_pages=(30,))
PARAMS = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
POLICY = SchedulerPolicy(max_waiting=2)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def drain(loop: HostLoop) -> dict[str, RequestOutput]:
    outputs = {d.request_id: d.output for d in loop.run_until_idle() if d.output is not None}
    loop.check_integrity()
    return outputs


def test_a_clock_that_jumps_changes_no_answer() -> None:
    clock, jumps = Clock(), random.Random(5)
    cache = CacheIdentity(model="fake", kv_format="fake")
    loop = HostLoop(FakeEngine(LIMITS), clock=clock, cache=cache)
    prompts = [[number] * (number % 17 + 1) for number in range(30)]
    for number, prompt in enumerate(prompts):
        loop.add(str(number), prompt, PARAMS)
    outputs: dict[str, RequestOutput] = {}
    while not loop.idle:
        clock.now += jumps.choice([0.0, 0.01, -500.0, 3600.0, -0.01])
        outputs |= {d.request_id: d.output for d in loop.step() if d.output is not None}
    loop.check_integrity()
    for number, prompt in enumerate(prompts):
        assert outputs[str(number)].outputs[0].token_ids == expected_answer(LIMITS, prompt, PARAMS, 3)[0]


def test_a_deadline_ends_the_waiting_and_the_running_and_nobody_else() -> None:
    clock = Clock()
    engine = FakeEngine(make_limits(num_slots=1))
    loop = HostLoop(engine, clock=clock)
    late = ServiceTerms(deadline=clock.now + 5)
    loop.add("running", [1, 2], PARAMS, terms=late)
    for _ in range(4):
        loop.step()
    loop.add("waiting", [1, 2], PARAMS, terms=late)
    loop.add("patient", [1, 2], PARAMS)
    clock.now += 6
    outputs = drain(loop)
    ends = {name: output.outputs[0].finish_reason for name, output in outputs.items()}
    assert ends == {"running": "expired", "waiting": "expired", "patient": "length"}
    tokens = expected_answer(LIMITS, [1, 2], PARAMS, 3)[0]
    assert outputs["running"].outputs[0].token_ids == tokens[: len(outputs["running"].outputs[0].token_ids)]
    assert outputs["waiting"].outputs[0].token_ids == []
    assert len(engine.loads) == 2, "what expired in the queue never got a slot"


def test_a_closed_door_says_when_to_come_back_and_opens_again() -> None:
    clock = Clock()
    gate = AdmissionGate(POLICY, num_slots=4, num_pages=29, page_size=4)
    loop = HostLoop(FakeEngine(LIMITS), clock=clock, policy=POLICY, gate=gate)
    for number in range(6):
        loop.add(str(number), [1, 2, 3], PARAMS)
    with pytest.raises(OverloadError, match="2 requests wait already; the limit is 2") as refusal:
        loop.add("too many", [1, 2, 3], PARAMS)
    assert refusal.value.reason == "queue_full"
    assert refusal.value.retry_after > 0
    for number in range(4):
        assert loop.abort(str(number))  # Their callers have gone.
    clock.now += 1
    loop.step()
    loop.add("later", [1, 2, 3], PARAMS)
    outputs = drain(loop)
    answered = {name for name, one in outputs.items() if one.outputs[0].finish_reason == "length"}
    assert answered == {"4", "5", "later"}
    assert gate.loads()[1].num_waiting == gate.loads()[1].num_running == 0


def test_a_refused_request_leaves_no_ticket_behind() -> None:
    gate = AdmissionGate(POLICY, num_slots=4, num_pages=29, page_size=4)
    loop = HostLoop(FakeEngine(LIMITS), policy=POLICY, gate=gate)
    ticket = loop.admit([1, 2, 3], PARAMS)
    assert ticket is not None
    loop.add("a", [1, 2, 3], PARAMS, ticket=ticket)
    second = loop.admit([1, 2, 3], PARAMS)
    with pytest.raises(ValueError, match="in use"):
        loop.add("a", [1, 2, 3], PARAMS, ticket=second)
    drain(loop)
    assert sum(load.num_waiting + load.num_running for load in gate.loads()) == 0


def test_a_failed_step_gives_back_every_ticket_and_ends_every_request() -> None:
    gate = AdmissionGate(POLICY, num_slots=4, num_pages=29, page_size=4)
    cache = CacheIdentity(model="fake", kv_format="fake")
    loop = HostLoop(FakeEngine(LIMITS, fail_at=3), policy=POLICY, gate=gate, cache=cache)
    for number in range(5):
        loop.add(str(number), [1, 2, 3], PARAMS)
    with pytest.raises(RuntimeError, match="the device has gone"):
        list(loop.run_until_idle())
    ends = {d.request_id: d.finish_reason for d in loop.take_deltas()}
    assert ends == {str(number): "error" for number in range(5)}
    loop.check_integrity()
    assert sum(load.num_waiting + load.num_running for load in gate.loads()) == 0
