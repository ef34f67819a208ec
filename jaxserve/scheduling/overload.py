"""The door: who is let in to wait, and what the others are told at once: why, and when to come back.

Nothing here knows of the scheduler. A request that is let in holds a ticket, which is told when it gets a
slot and when it ends; from these alone come the lengths of the queues and the rates at which they drain.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from math import ceil

from jaxserve.plan import EngineLimits
from jaxserve.scheduling.answer_lengths import AnswerLengths
from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.crowd import ClassState, Crowd, Demand, FadingCount, TenantState
from jaxserve.scheduling.drain import SHORTEST_RETRY, Congestion, DrainRate
from jaxserve.scheduling.refusals import OverloadError, Reason
from jaxserve.scheduling.terms import ServiceTerms

_MAX_TENANTS = 4096
"""Tenants at which those are forgotten that have nothing open and their whole rate to use."""
_HELD_UP = 0.25
"""Seconds after which one that waits though slots are free waits for something else: pages, or its turn for
the prompt tokens of a step."""


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """How one class stands."""

    name: str
    num_waiting: int
    """Requests that are let in and have no slot."""
    num_running: int
    num_waiting_tokens: float
    num_waiting_pages: int
    requests_per_second: float
    """Started, as measured while some waited; 0 if that is not known yet."""
    tokens_per_second: float


class Ticket:
    """A request that was let in. Safe to use from any thread; `release` must come, once or more."""

    def __init__(self, gate: AdmissionGate, class_index: int, demand: Demand) -> None:
        self._gate = gate
        self.class_index = class_index
        self.demand = demand
        self.started_at: float | None = None
        self.released = False

    def start(self, now: float) -> None:
        """It has got a slot for the first time. Until then the gate takes it for one that waits."""
        self._gate.mark_started(self, now)

    def release(self, now: float, num_output: int = 0) -> None:
        """It has ended, with so many output tokens over all samples. Later calls do nothing."""
        self._gate.mark_released(self, now, num_output)


class AdmissionGate:
    """Bounded queues, quotas and predictions. Safe to use from several threads."""

    def __init__(self, policy: SchedulerPolicy, *, num_slots: int, num_pages: int, page_size: int) -> None:
        """`num_pages`: in the pool, of the group that is used up first; `page_size`: tokens on a page.

        Raises ValueError for a count below 1.
        """
        for name, value in (("num_slots", num_slots), ("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} {value} is below 1")
        self.policy = policy
        self.num_refused: Counter[Reason] = Counter()
        self._num_slots = num_slots
        self._num_pages = num_pages
        self._page_size = page_size
        self._classes = [ClassState(one) for one in policy.classes]
        self._tenants: dict[str, TenantState] = {}
        self._num_to_tidy = _MAX_TENANTS
        self._everyone = Crowd()
        self._drain = DrainRate()
        """Of all classes together."""
        self._congestion = Congestion()
        self._num_running = 0
        self._lengths = AnswerLengths(policy)
        self._first_tries = FadingCount(policy.retries.window)
        self._retries = FadingCount(policy.retries.window)
        self._lock = threading.Lock()

    @classmethod
    def for_engine(cls, policy: SchedulerPolicy, limits: EngineLimits) -> AdmissionGate:
        """The door of an engine with these limits.

        Pages are counted in a group that keeps all of a sequence, where there is one: of those behind a
        window even a long sequence has few. Page 0 is never given out.
        """
        groups = list(zip(limits.num_pages, limits.windows, strict=True))
        num_pages = min(pages for pages, window in groups if not window or all(limits.windows)) - 1
        num_pages *= limits.num_replicas
        return cls(policy, num_slots=limits.num_slots, num_pages=num_pages, page_size=limits.page_size)

    def admit(
        self,
        terms: ServiceTerms,
        num_prompt_tokens: int,
        max_tokens: int,
        now: float,
        *,
        num_samples: int = 1,
    ) -> Ticket:
        """Let a request in, or raise OverloadError.

        Args:
            terms: whose it is, how urgent, and its deadline on the same clock as `now`.
            num_prompt_tokens: known exactly.
            max_tokens: the longest answer; the expected one is predicted from those before it.
            now: seconds on any steady clock.
            num_samples: answers to the prompt.

        Raises ValueError if the priority is no class.
        """
        class_index = self.policy.class_index(terms)
        with self._lock:
            state = self._classes[class_index]
            self._measure(state, now)
            tenant = self._tenant(terms.tenant, now)
            num_output = num_samples * self._lengths.mean(class_index, max_tokens)
            demand = self._demand(terms, tenant, num_samples, num_prompt_tokens, num_output, now)
            self._check(state, tenant, demand, terms, num_output / num_samples, now)
            self._enter(state, tenant, demand, terms.is_retry, now)
        return Ticket(self, class_index, demand)

    def check(self, terms: ServiceTerms, now: float) -> None:
        """Raise as `admit` does where it would refuse even the smallest request on these terms.

        For a caller whom it costs something to find out how large a request is.
        """
        class_index = self.policy.class_index(terms)
        with self._lock:
            state = self._classes[class_index]
            self._measure(state, now)
            tenant = self._tenant(terms.tenant, now)
            demand = self._demand(terms, tenant, 1, 1, 1.0, now)
            self._check(state, tenant, demand, terms, 1.0, now)

    def loads(self) -> tuple[ClassLoad, ...]:
        """How every class of the policy stands."""
        with self._lock:
            return tuple(
                ClassLoad(
                    state.priority_class.name,
                    state.crowd.num_requests,
                    state.num_running,
                    state.crowd.num_tokens,
                    state.crowd.num_pages,
                    state.drain.requests_per_second,
                    state.drain.tokens_per_second,
                )
                for state in self._classes
            )

    def mark_started(self, ticket: Ticket, now: float) -> None:
        """See `Ticket.start`."""
        with self._lock:
            if ticket.released or ticket.started_at is not None:
                return
            state = self._classes[ticket.class_index]
            demand = ticket.demand
            self._measure(state, now, demand)
            ticket.started_at = now
            self._exit(state, demand)
            state.num_running += demand.num_requests
            self._num_running += demand.num_requests

    def mark_released(self, ticket: Ticket, now: float, num_output: int) -> None:
        """See `Ticket.release`."""
        with self._lock:
            if ticket.released:
                return
            ticket.released = True
            state, demand = self._classes[ticket.class_index], ticket.demand
            self._measure(state, now)
            if num_output:
                self._learn(ticket, state, now, num_output)
            if ticket.started_at is None:
                self._exit(state, demand)
            else:
                state.num_running -= demand.num_requests
                self._num_running -= demand.num_requests
            tenant = self._tenants[demand.tenant]
            tenant.num_open -= demand.num_requests
            tenant.refill(now)
            served = (
                0 if ticket.started_at is None and not num_output else demand.num_prompt_tokens + num_output
            )
            tenant.level += demand.num_tokens - served
            if tenant.forgettable:
                del self._tenants[demand.tenant]

    # Bookkeeping, under the lock -------------------------------------------------------------------------

    def _demand(
        self,
        terms: ServiceTerms,
        tenant: TenantState,
        num_samples: int,
        num_prompt: int,
        num_output: float,
        now: float,
    ) -> Demand:
        """What a request asks for; `num_output`: expected tokens over all samples."""
        num_tokens = num_prompt + num_output
        num_pages = ceil(num_tokens / self._page_size)
        weight, urgent = tenant.policy.weight, terms.deadline is not None
        return Demand(terms.tenant, weight, num_samples, num_prompt, num_tokens, num_pages, urgent, now)

    def _tenant(self, name: str, now: float) -> TenantState:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._num_to_tidy:
                self._forget_tenants(now)
            tenant = self._tenants[name] = TenantState(self.policy.tenant(name), now)
        tenant.refill(now)
        return tenant

    def _forget_tenants(self, now: float) -> None:
        for one in self._tenants.values():
            one.refill(now)
        self._tenants = {name: one for name, one in self._tenants.items() if not one.forgettable}
        self._num_to_tidy = max(_MAX_TENANTS, 2 * len(self._tenants))

    def _enter(
        self, state: ClassState, tenant: TenantState, demand: Demand, is_retry: bool, now: float
    ) -> None:
        (self._retries if is_retry else self._first_tries).add(now)
        tenant.num_open += demand.num_requests
        tenant.level -= demand.num_tokens
        state.crowd.enter(demand)
        self._everyone.enter(demand)

    def _measure(self, state: ClassState, now: float, started: Demand | None = None) -> None:
        """Time has passed for a class and for everybody; perhaps one has started that had to wait."""
        self._congestion.advance(now, self._num_excess(self._everyone, now) > 0)
        for crowd, drain in ((state.crowd, state.drain), (self._everyone, self._drain)):
            backlog = self._num_excess(crowd, now) > 0
            drain.advance(now, backlog)
            if backlog and started is not None:
                drain.start(started.num_requests, started.num_tokens)

    def _exit(self, state: ClassState, demand: Demand) -> None:
        state.crowd.exit(demand)
        self._everyone.exit(demand)

    def _learn(self, ticket: Ticket, state: ClassState, now: float, num_output: int) -> None:
        per_sample = max(round(num_output / ticket.demand.num_requests), 1)
        self._lengths.observe(ticket.class_index, per_sample)
        if ticket.started_at is not None:
            measured = max(now - ticket.started_at, 0.0) / per_sample
            known = state.seconds_per_token
            state.seconds_per_token = known + (measured - known) / 16 if known else measured

    def _num_free(self, now: float) -> int:
        """Slots that nothing keeps from being filled."""
        if self._everyone.all.longest_wait(now) > _HELD_UP:
            return 0
        return max(0, self._num_slots - self._num_running)

    def _num_excess(self, crowd: Crowd, now: float) -> int:
        """Requests of those let in for which there is no room."""
        return max(0, crowd.num_requests - self._num_free(now))

    def _would_wait(self, now: float) -> bool:
        return self._everyone.num_requests >= self._num_free(now)

    # Refusals, under the lock ----------------------------------------------------------------------------

    def _check(
        self,
        state: ClassState,
        tenant: TenantState,
        demand: Demand,
        terms: ServiceTerms,
        num_output: float,
        now: float,
    ) -> None:
        """Raise OverloadError, and count it, for what is too much. `num_output`: expected of each sample."""
        try:
            self._check_tenant(state, tenant, demand)
            self._check_queues(state, demand)
            self._check_prediction(state, demand, terms.deadline, num_output)
            self._check_retry(state, terms, now)
        except OverloadError as error:
            self.num_refused[error.reason] += 1
            raise

    def _check_tenant(self, state: ClassState, tenant: TenantState, demand: Demand) -> None:
        # One of its requests ends after about so many of the class's.
        num_ends = (state.num_running + state.crowd.num_requests) / max(tenant.num_open, 1)
        num_waiting = self._everyone.part(demand.tenant).num_tokens
        tenant.check(demand, num_waiting, lambda: state.drain.retry_after(num_ends))

    def _check_queues(self, state: ClassState, demand: Demand) -> None:
        """The bounds on those that wait; a request for which there is a slot is not one of them."""
        one, crowd, now = state.priority_class, state.crowd, demand.since
        if self._would_wait(now):
            total, own = self._num_excess(self._everyone, now), self._num_excess(crowd, now)
            if self._everyone.is_full(demand, total, self.policy.max_waiting):
                message = f"{total} requests wait already; the limit is {self.policy.max_waiting}"
                raise OverloadError("queue_full", message, self._drained(state, now))
            if crowd.is_full(demand, own, one.max_waiting):
                message = f"{own} requests of class {one.name!r} wait already; the limit is {one.max_waiting}"
                raise OverloadError("queue_full", message, self._drained(state, now))
        if not crowd.num_requests:
            return
        limit = one.max_waiting_tokens
        if limit is not None and crowd.num_tokens + demand.num_tokens > limit:
            message = (
                f"{crowd.num_tokens:.0f} tokens of class {one.name!r} wait already and the request needs "
                f"{demand.num_tokens:.0f}; the limit is {limit}"
            )
            raise OverloadError("tokens", message, self._drained(state, now))
        most_pages = one.max_waiting_pools * self._num_pages
        if crowd.num_pages + demand.num_pages > most_pages:
            message = (
                f"requests of class {one.name!r} that wait already are predicted to need {crowd.num_pages} "
                f"pages and this one {demand.num_pages}; the limit is {most_pages:.0f}"
            )
            raise OverloadError("kv", message, self._drained(state, now))

    def _check_prediction(
        self, state: ClassState, demand: Demand, deadline: float | None, num_output: float
    ) -> None:
        """A deadline that will be missed as things go, or more patience than the class has."""
        name, now = state.priority_class.name, demand.since
        if deadline is not None and deadline <= now:
            message = f"the deadline passed {now - deadline:.3g} seconds ago"
            raise OverloadError("deadline", message, SHORTEST_RETRY)
        if not self._would_wait(now):
            return
        wait = self._predict_wait(state, demand)
        patience = state.priority_class.patience(standing=self._congestion.standing)
        if wait > patience:
            message = f"a request of class {name!r} would wait {wait:.3g} seconds; the limit is {patience:g}"
            raise OverloadError("queue_full", message, self._drained(state, now))
        if deadline is None or not state.drain.confident:
            return
        needed = wait + state.seconds_per_token * num_output
        if now + needed > deadline:
            message = (
                f"the answer would take {needed:.3g} seconds, {wait:.3g} of them in the queue; "
                f"the deadline leaves {deadline - now:.3g}"
            )
            raise OverloadError("deadline", message, self._drained(state, now))

    def _check_retry(self, state: ClassState, terms: ServiceTerms, now: float) -> None:
        if not (terms.is_retry and self._would_wait(now)):
            return
        budget = self.policy.retries
        limit = max(budget.ratio * self._first_tries.read(now), float(budget.at_least))
        num_retries = round(self._retries.read(now))
        if num_retries + 1 > limit:
            message = (
                f"{num_retries} retries were let in within {budget.window:g} seconds; the limit is "
                f"{limit:.0f}, {budget.ratio:.0%} of the first tries and at least {budget.at_least}"
            )
            raise OverloadError("retry_budget", message, self._drained(state, now))

    def _drained(self, state: ClassState, now: float) -> float:
        """Seconds in which those of the class that wait get their slots, and one more."""
        return state.drain.retry_after(self._num_excess(state.crowd, now) + 1)

    def _predict_wait(self, state: ClassState, demand: Demand) -> float:
        """Seconds until the request starts: what is ahead of it at the measured rate, at most all of the
        class, and no more than what its tenant has there at the tenant's share of the rate.

        While no rate is known, and whatever it promises: as long as its tenant's first has waited so far.
        """
        crowd, part = state.crowd, state.crowd.part(demand.tenant)
        waited = 0.0 if demand.urgent else part.longest_wait(demand.since)
        rate = self._rate(state)
        if not rate:
            return waited
        ahead = part.num_urgent_tokens if demand.urgent else part.num_tokens
        return max(waited, min(crowd.num_tokens, ahead / crowd.share(demand)) / rate)

    def _rate(self, state: ClassState) -> float:
        """Tokens a second at which a class starts, as measured; before there are enough of its own starts,
        its share of everybody's. 0 if nothing is known."""
        if state.drain.confident or not self._drain.indicative:
            return state.drain.tokens_per_second if state.drain.confident else 0.0
        own = state.priority_class.share
        others = (
            one.priority_class.share for one in self._classes if one.crowd.num_requests and one is not state
        )
        return self._drain.tokens_per_second * own / (own + sum(others))
