"""The waiting queue: who is next for a slot, in time that does not grow with those who wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil, inf
from typing import Protocol

from jaxserve.scheduling.answer_lengths import AnswerLengths
from jaxserve.scheduling.classes import PriorityClass, SchedulerPolicy
from jaxserve.scheduling.fair_order import FairOrder
from jaxserve.scheduling.fair_shares import Accounts
from jaxserve.scheduling.plain_orders import FirstComeOrder, LongestPrefixOrder, PrefixScore
from jaxserve.scheduling.request import COMPLETE, Request, RequestState
from jaxserve.scheduling.waiting import Entry, EntryHeap

_ONE_CLASS = PriorityClass(name="any")
VictimKey = tuple[bool, int, int, int, int]


class Order(Protocol):
    """How the queue chooses; see `FairOrder` for what each method means."""

    def enter(self, entry: Entry) -> None: ...
    def exit(self, entry: Entry) -> None: ...
    def show(self, entry: Entry) -> None: ...
    def hide(self, entry: Entry) -> None: ...
    def serve(self, entry: Entry) -> None: ...
    def pick(self, now: float) -> Entry | None: ...


class RequestQueue:
    """The requests that wait for a slot, and what is known of those that have one. Not thread-safe.

    A request is pushed, may be peeked at, and leaves by `start`, `remove` or `expire`. A started one is
    reported by `leave` when it gives up its slot, ended or preempted, and may be pushed again. Operations
    cost at most the logarithm of the length, amortised.

    A round of planning begins with `begin_round`. Whoever `peek` shows is next; if there is no room for it,
    the planner waits, or lets others pass with `set_aside`, which the policy bounds: a large request is
    passed by `max_passed` others at most, and by nobody once it is overdue.
    """

    def __init__(self, policy: SchedulerPolicy, *, score: PrefixScore | None = None) -> None:
        """`score`: cached tokens of a request, needed by the order "longest-prefix".

        Raises ValueError if that order has no score.
        """
        self.policy = policy
        self.accounts = Accounts(policy)
        self._num_waiting = [0] * len(policy.classes)
        self._num_running = [0] * len(policy.classes)
        self._num_of_tenant: Counter[str] = Counter()
        self._order = self._make_order(score)
        self._waiting: dict[Request, Entry] = {}
        self._running: dict[Request, Entry] = {}
        self._deadlines = EntryHeap()
        self._expired: list[Entry] = []
        self._aside: list[Entry] = []
        self._lengths = AnswerLengths(policy)
        self._paid: dict[Request, int] = {}
        """Output tokens that requests have paid for in advance."""
        self._num_may_pass = policy.max_passed
        """Requests that may yet start in this round while others are set aside."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def num_waiting(self, class_index: int) -> int:
        """Requests of a class in the queue."""
        return self._num_waiting[class_index]

    def num_running(self, class_index: int) -> int:
        """Requests of a class that have started and not left."""
        return self._num_running[class_index]

    def num_waiting_of(self, tenant: str) -> int:
        """Requests of a tenant in the queue."""
        return self._num_of_tenant[tenant]

    def push(self, request: Request, now: float) -> None:
        """Let a request wait: a new one since its arrival, a preempted one since now.

        Raises ValueError if its priority is no class.
        """
        assert not request.queued, "the request is in the queue already"
        terms = request.submission.terms
        class_index = self.policy.class_index(terms)
        returns = request.state is RequestState.PREEMPTED
        since = now if returns else request.submission.arrival_time
        entry = Entry(
            request,
            class_index,
            self.accounts.index(terms.tenant, class_index),
            inf if terms.deadline is None else terms.deadline,
            since + self.policy.classes[class_index].max_wait,
            returns,
        )
        request.queued = True
        self.accounts.open(entry.account)
        self._waiting[request] = entry
        self._num_waiting[class_index] += 1
        self._num_of_tenant[terms.tenant] += 1
        self._order.enter(entry)
        self._show(entry)

    def peek(self, now: float) -> Request | None:
        """The request that is next, never an expired one; None if no request may start now."""
        self._set_expired_apart(now)
        if self._aside and not self._num_may_pass:
            return None
        entry = self._order.pick(now)
        return None if entry is None else entry.request

    def start(self, request: Request, num_cached: int = 0) -> int:
        """A waiting request gets a slot; return its account, to charge its output tokens to.

        `num_cached`: known tokens that need not be computed, for which its tenant is not charged. One that
        was preempted pays nothing for computing again.
        """
        entry = self._waiting[request]
        self._order.serve(entry)
        self._withdraw(entry)
        if not entry.returns:
            self.accounts.charge_prompt(entry.account, request.num_known - num_cached)
        self._running[request] = entry
        self._num_running[entry.class_index] += 1
        if self._aside:
            self._num_may_pass -= 1
            for passed in self._aside:
                passed.num_passed += 1
        return entry.account

    def lend(self, request: Request, num_cached: int) -> None:
        """A waiting request leaves, to be pushed again when its text has been computed elsewhere, for which
        its tenant is charged as by `start`."""
        entry = self._waiting[request]
        self._order.serve(entry)
        self._withdraw(entry)
        if not entry.returns:
            self.accounts.charge_prompt(entry.account, request.num_known - num_cached)
        self.accounts.close(entry.account)

    def prepay(self, request: Request) -> int:
        """Charge a started request for the answer that is expected of it, once; return its output tokens for
        which it has paid. Those beyond are charged as they come."""
        paid = self._paid.get(request)
        if paid is None:
            paid = self._paid[request] = self.expected_output(request)
            self.accounts.charge_answer(self._running[request].account, paid)
        return paid

    def expected_output(self, request: Request) -> int:
        """Output tokens of an answer such as those that requests of the class have had."""
        return ceil(self._lengths.mean(self.class_index(request), request.submission.max_tokens))

    def settle(self, request: Request) -> None:
        """A request has ended, and is about to leave: what it has paid for and not had is its account's."""
        paid = self._paid.pop(request, None)
        if paid is None:
            return
        entry = self._waiting.get(request) or self._running.get(request)
        if entry is None:
            return  # It was preempted and has expired in the queue: its account is closed.
        num_output = len(request.output)
        if request.state in COMPLETE:
            self._lengths.observe(entry.class_index, num_output)
        if num_output < paid:
            self.accounts.refund_answer(entry.account, paid - num_output)

    def leave(self, request: Request) -> None:
        """A started request has given up its slot."""
        entry = self._running.pop(request)
        self._num_running[entry.class_index] -= 1
        self.accounts.close(entry.account)

    def remove(self, request: Request) -> None:
        """A waiting request has ended, wherever it stands."""
        entry = self._waiting[request]
        if not entry.live and entry in self._aside:
            self._aside.remove(entry)
            if not self._aside:
                self._num_may_pass = self.policy.max_passed
        self._withdraw(entry)
        self.accounts.close(entry.account)

    def begin_round(self) -> None:
        """Begin a round of planning: those set aside may be chosen again."""
        for entry in self._aside:
            if self._waiting.get(entry.request) is entry:
                shown = replace(entry, live=True)
                self._waiting[entry.request] = shown
                self._show(shown)
        self._aside.clear()
        self._num_may_pass = self.policy.max_passed

    def expire(self, now: float) -> list[Request]:
        """Take out those whose deadline has passed. The caller ends them, before they cost anything."""
        self._set_expired_apart(now)
        apart, self._expired = self._expired, []
        expired = [entry.request for entry in apart if self._waiting.get(entry.request) is entry]
        for request in expired:
            self.remove(request)
        return expired

    def set_aside(self, request: Request, now: float) -> bool:
        """Let others be chosen before a waiting request for the rest of this round; False, and nothing
        changes, if it is overdue or has been passed as often as the policy allows."""
        entry = self._waiting[request]
        num_may_pass = min(self._num_may_pass, self.policy.max_passed - entry.num_passed)
        if entry.due <= now or num_may_pass < 1:
            return False
        self._num_may_pass = num_may_pass
        self._hide(entry)
        self._aside.append(entry)
        return True

    def class_index(self, request: Request) -> int:
        """Position in the policy's classes of a request that waits or runs."""
        entry = self._waiting.get(request) or self._running[request]
        return entry.class_index

    def priority_class(self, request: Request) -> PriorityClass:
        """The class of a request that waits or runs; outside the fair order all are of one class."""
        if self.policy.order != "fair":
            return _ONE_CLASS
        return self.policy.classes[self.class_index(request)]

    def below_floor(self, request: Request) -> bool:
        """Whether a waiting request's class runs in less than its reserved part of the slots in use."""
        if self.policy.order != "fair":
            return False
        index = self.class_index(request)
        return self._num_running[index] < int(self.policy.classes[index].reserved * len(self._running))

    def precedes(self, request: Request, other: Request) -> bool:
        """Whether a request is of a more urgent class than another."""
        return self.priority_class(request).rank < self.priority_class(other).rank

    def victim_key(self, request: Request, num_computed: int) -> VictimKey:
        """The running request with the lowest key is the one to preempt.

        The least urgent class, then the least work that is lost, then the latest arrived; but one that has
        been preempted `max_preemptions` times only after all others, so that every request ends.
        """
        arrival, sample = request.order
        if self.policy.order != "fair":
            return False, 0, 0, -arrival, -sample
        spared = request.num_admissions > self.policy.max_preemptions
        return spared, -self.priority_class(request).rank, num_computed, -arrival, -sample

    def _make_order(self, score: PrefixScore | None) -> Order:
        if self.policy.order == "fair":
            return FairOrder(self.policy, self.accounts, self._num_running)
        if self.policy.order == "fcfs":
            return FirstComeOrder()
        if score is None:
            raise ValueError("the order 'longest-prefix' needs a score")
        return LongestPrefixOrder(score)

    def _show(self, entry: Entry) -> None:
        self._order.show(entry)
        if entry.deadline < inf:
            self._deadlines.push(entry.urgency, entry)

    def _hide(self, entry: Entry) -> None:
        entry.live = False
        self._order.hide(entry)
        if entry.deadline < inf:
            self._deadlines.bury()

    def _withdraw(self, entry: Entry) -> None:
        """Take an entry out of everything that it is in."""
        if entry.live:
            self._hide(entry)
        self._order.exit(entry)
        request = entry.request
        request.queued = False
        del self._waiting[request]
        self._num_waiting[entry.class_index] -= 1
        tenant = request.submission.terms.tenant
        self._num_of_tenant[tenant] -= 1
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant]

    def _set_expired_apart(self, now: float) -> None:
        """Whoever has expired waits for `expire` to hand it over, and is not chosen any more."""
        while (entry := self._deadlines.peek()) is not None and entry.deadline <= now:
            self._hide(entry)
            self._expired.append(entry)
