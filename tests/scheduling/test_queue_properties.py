"""What holds of the queue whatever happens: nobody is lost, starved, out of turn or served too late."""

from __future__ import annotations

from collections import Counter
from math import inf

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.scheduling.classes import PriorityClass, SchedulerPolicy
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request, RequestState
from tests.scheduling.waiting_requests import make_request, preempt, start_next

CLASSES = (
    PriorityClass(name="interactive", rank=0, share=8, reserved=0.5, max_wait=5),
    PriorityClass(name="default", rank=1, share=4, max_wait=20),
    PriorityClass(name="retry", rank=2, share=1, max_wait=20),
    PriorityClass(name="batch", rank=3, share=1, max_wait=50),
)
NUM_SLOTS = 4
POLICY = SchedulerPolicy(classes=CLASSES, max_passed=3)
TENANTS = ["x", "y", "z"]


class QueueMachine(RuleBasedStateMachine):
    """The queue beside a plain list of what should be in it."""

    @initialize()
    def set_up(self) -> None:
        self.queue = RequestQueue(POLICY)
        self.now = 0.0
        self.waiting: dict[Request, float] = {}
        """When each will have waited longer than its class allows."""
        self.running: list[Request] = []
        self.aside: set[Request] = set()
        self.num_passed: Counter[Request] = Counter()

    @rule(
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from([one.name for one in CLASSES]),
        is_retry=st.booleans(),
        patience=st.none() | st.floats(0.0, 60.0),
        prompt_len=st.integers(1, 50),
    )
    def arrive(
        self, tenant: str, priority: str, is_retry: bool, patience: float | None, prompt_len: int
    ) -> None:
        deadline = None if patience is None else self.now + patience
        request = make_request(
            tenant,
            priority,
            arrival=self.now,
            deadline=deadline,
            prompt_len=prompt_len,
            is_retry=is_retry,
        )
        self.queue.push(request, self.now)
        self.waiting[request] = self.now + POLICY.priority_class(request.submission.terms).max_wait

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.running) < NUM_SLOTS)
    @rule()
    def start(self) -> None:
        chosen = self.queue.peek(self.now)
        if chosen is None:
            self.check_nobody_may_start()
            return
        self.check_turn(chosen)
        returns = chosen.state is RequestState.PREEMPTED
        self.check_within_class(chosen, returns)
        assert start_next(self.queue, self.now) is chosen
        del self.waiting[chosen]
        self.running.append(chosen)
        for request in self.aside:
            self.num_passed[request] += 1
            assert self.num_passed[request] <= POLICY.max_passed

    @precondition(lambda self: self.running)
    @rule(data=st.data(), again=st.booleans(), num_output=st.integers(0, 40))
    def leave(self, data: st.DataObject, again: bool, num_output: int) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        account = self.queue.accounts.index(request.submission.terms.tenant, self.queue.class_index(request))
        self.queue.accounts.charge(np.array([account]), num_output)
        if not again:
            self.queue.leave(request)
            return
        preempt(self.queue, request, self.now)
        self.num_passed.pop(request, None)
        self.waiting[request] = self.now + POLICY.priority_class(request.submission.terms).max_wait

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.waiting)))
        self.queue.remove(request)
        self.forget(request)

    @rule()
    def pass_over(self) -> None:
        head = self.queue.peek(self.now)
        if head is not None and self.queue.set_aside(head, self.now):
            assert self.waiting[head] > self.now, "the overdue are passed by nobody"
            self.aside.add(head)

    @rule()
    def begin_round(self) -> None:
        self.queue.begin_round()
        self.aside.clear()
        expired = self.queue.expire(self.now)
        assert set(expired) == {request for request in self.waiting if self.has_expired(request)}
        assert len(set(expired)) == len(expired)
        for request in expired:
            self.forget(request)

    @invariant()
    def lengths_are_exact(self) -> None:
        queue = self.queue
        assert len(queue) == len(self.waiting)
        index = POLICY.class_index
        by_class = Counter(index(request.submission.terms) for request in self.waiting)
        running = Counter(index(request.submission.terms) for request in self.running)
        for number in range(len(CLASSES)):
            assert queue.num_waiting(number) == by_class[number]
            assert queue.num_running(number) == running[number]
        by_tenant = Counter(request.submission.terms.tenant for request in self.waiting)
        assert [queue.num_waiting_of(tenant) for tenant in TENANTS] == [by_tenant[name] for name in TENANTS]
        assert all(request.queued for request in self.waiting)
        assert not any(request.queued for request in self.running)

    def forget(self, request: Request) -> None:
        del self.waiting[request]
        self.aside.discard(request)
        self.num_passed.pop(request, None)

    def has_expired(self, request: Request) -> bool:
        deadline = request.submission.terms.deadline
        return deadline is not None and deadline <= self.now

    def candidates(self) -> list[Request]:
        return [one for one in self.waiting if one not in self.aside and not self.has_expired(one)]

    def check_nobody_may_start(self) -> None:
        assert not self.candidates() or self.aside

    def check_turn(self, chosen: Request) -> None:
        """A floor, or else the longest overdue."""
        assert chosen in self.candidates()
        index = POLICY.class_index
        num_interactive = sum(index(request.submission.terms) == 0 for request in self.running)
        urgent = [request for request in self.candidates() if index(request.submission.terms) == 0]
        if urgent and num_interactive < (len(self.running) + 1) // 2:
            assert index(chosen.submission.terms) == 0
            return
        overdue = [(due, request) for request, due in self.waiting.items() if due <= self.now]
        overdue = [(due, request) for due, request in overdue if request in self.candidates()]
        if overdue:
            assert self.waiting[chosen] == min(due for due, _ in overdue)

    def check_within_class(self, chosen: Request, returns: bool) -> None:
        """Of those not overdue: the preempted before the new, and a tenant's earliest deadline first."""
        if self.waiting[chosen] <= self.now:
            return
        index = POLICY.class_index(chosen.submission.terms)
        peers = [one for one in self.candidates() if POLICY.class_index(one.submission.terms) == index]
        returning = [one for one in peers if one.state is RequestState.PREEMPTED]
        if returning:
            assert returns
            assert chosen.order == min(one.order for one in returning)
            return
        tenant = chosen.submission.terms.tenant
        own = [one for one in peers if one.submission.terms.tenant == tenant]
        assert urgency(chosen) == min(urgency(one) for one in own)


def urgency(request: Request) -> tuple[float, tuple[int, int]]:
    deadline = request.submission.terms.deadline
    return (inf if deadline is None else deadline), request.order


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32 - 1), st.sampled_from([(1.0, 1.0), (3.0, 1.0)]))
def test_two_backlogged_tenants_are_served_alike(seed: int, weights: tuple[float, float]) -> None:
    """Whoever was started last had the lowest counter; it may be ahead by that prompt and what then runs."""
    rng = np.random.default_rng(seed)
    max_prompt, max_output, num_slots = 200, 100, 8
    names = ("a", "b")
    policy = SchedulerPolicy.from_mapping(
        {"tenants": {name: {"weight": weight} for name, weight in zip(names, weights, strict=True)}}
    )
    queue = RequestQueue(policy)
    served = dict.fromkeys(names, 0.0)
    left: dict[Request, int] = {}
    accounts: dict[Request, int] = {}
    # One tenant has many small requests, the other few large ones.
    scale = {"a": 0.1, "b": 1.0}
    bound = (max_prompt + 2 * num_slots * max_output) / min(weights)
    for step in range(700):
        for name in names:
            while queue.num_waiting_of(name) <= num_slots:
                prompt_len = max(1, int(scale[name] * rng.integers(1, max_prompt + 1)))
                queue.push(make_request(name, prompt_len=prompt_len), float(step))
        while len(left) < num_slots:
            request = queue.peek(0.0)  # A clock that stands still: no bound on waiting interferes.
            assert request is not None
            accounts[request] = queue.start(request)
            left[request] = max(
                1, int(scale[request.submission.terms.tenant] * rng.integers(1, max_output + 1))
            )
            served[request.submission.terms.tenant] += len(request.submission.prompt)
        queue.accounts.charge(np.array([accounts[request] for request in left]), 1)
        for request in list(left):
            served[request.submission.terms.tenant] += 2
            left[request] -= 1
            if not left[request]:
                del left[request], accounts[request]
                queue.leave(request)
        shares = [served[name] / weight for name, weight in zip(names, weights, strict=True)]
        assert abs(shares[0] - shares[1]) <= bound
    assert min(served.values()) > 2 * bound


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32 - 1))
def test_nobody_waits_longer_than_the_limit_and_a_turnover(seed: int) -> None:
    """Under a flood of urgent requests, whose backlog grows without end, patient ones start in time."""
    rng = np.random.default_rng(seed)
    longest = 7
    classes = (
        PriorityClass(name="urgent", rank=0, share=1000, reserved=0.5, max_wait=inf),
        PriorityClass(name="patient", rank=1, share=0.001, max_wait=40),
    )
    queue = RequestQueue(SchedulerPolicy(classes=classes))
    ends: dict[Request, int] = {}
    num_patient = 0
    for now in range(600):
        queue.push(make_request("f", "urgent", arrival=now, prompt_len=5), now)
        queue.push(make_request("f", "urgent", arrival=now, prompt_len=5), now)
        if now % 20 == 0:
            queue.push(make_request("p", "patient", arrival=now, prompt_len=500), now)
        for request in [request for request, end in ends.items() if end <= now]:
            del ends[request]
            queue.leave(request)
        while len(ends) < NUM_SLOTS:
            request = start_next(queue, now)
            if request is None:
                break  # At the very beginning.
            ends[request] = now + int(rng.integers(1, longest + 1))
            if request.submission.terms.priority == "patient":
                num_patient += 1
                # Of the two slots beyond the floor one comes free within the longest answer.
                assert now - request.submission.arrival_time <= 40 + longest
    assert num_patient >= 25
    assert queue.num_waiting(0) > 100
