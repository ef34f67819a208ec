"""Sums over the requests that were let in: how many wait, with how much work, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, inf

from jaxserve.scheduling.classes import PriorityClass, TenantPolicy
from jaxserve.scheduling.drain import LONGEST_RETRY, SHORTEST_RETRY, DrainRate
from jaxserve.scheduling.refusals import OverloadError


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What a request will need, as predicted at the door. Identified by object."""

    tenant: str
    weight: float
    """Of the tenant."""
    num_requests: int
    """One for each sample: each takes a slot."""
    num_prompt_tokens: int
    num_tokens: float
    """Prompt, and the expected output of all samples."""
    num_pages: int
    urgent: bool
    """Whether it has a deadline, and goes before its tenant's requests that have none."""
    since: float
    """When it came."""


@dataclass(slots=True)
class Part:
    """What one tenant has in a crowd."""

    num_requests: int = 0
    num_tokens: float = 0.0
    num_urgent_tokens: float = 0.0
    waiting: dict[Demand, None] = field(default_factory=dict[Demand, None])
    """In the order in which they came."""

    def add(self, demand: Demand, sign: int) -> None:
        self.num_requests += sign * demand.num_requests
        self.num_tokens += sign * demand.num_tokens
        if demand.urgent:
            self.num_urgent_tokens += sign * demand.num_tokens
        if sign > 0:
            self.waiting[demand] = None
        else:
            del self.waiting[demand]

    def longest_wait(self, now: float) -> float:
        """Seconds that the first of them has waited; 0 if there is none."""
        first = next(iter(self.waiting), None)
        return 0.0 if first is None else now - first.since


class Crowd:
    """Requests that have been let in and have not started."""

    def __init__(self) -> None:
        self.all = Part()
        self.num_pages = 0
        self._parts: dict[str, Part] = {}
        self._weight = 0.0
        """Sum over the tenants that have a part."""

    @property
    def num_requests(self) -> int:
        return self.all.num_requests

    @property
    def num_tokens(self) -> float:
        return self.all.num_tokens

    def enter(self, demand: Demand) -> None:
        part = self._parts.get(demand.tenant)
        if part is None:
            part = self._parts[demand.tenant] = Part()
            self._weight += demand.weight
        part.add(demand, 1)
        self.all.add(demand, 1)
        self.num_pages += demand.num_pages

    def exit(self, demand: Demand) -> None:
        part = self._parts[demand.tenant]
        part.add(demand, -1)
        self.all.add(demand, -1)
        self.num_pages -= demand.num_pages
        if not part.num_requests:
            del self._parts[demand.tenant]
            self._weight = self._weight - demand.weight if self._parts else 0.0
        if not self.num_requests:
            self.all = Part()  # Without what rounding has left.

    def part(self, tenant: str) -> Part:
        """What a tenant has here; not to be changed."""
        return self._parts.get(tenant, Part())

    def share(self, demand: Demand) -> float:
        """The part of the service, from 0 to 1, that is the tenant's by weight once the demand is here."""
        others = self._weight - (demand.weight if demand.tenant in self._parts else 0.0)
        return demand.weight / (others + demand.weight)

    def is_full(self, demand: Demand, num_waiting: int, limit: int | None) -> bool:
        """Whether `num_waiting` of these leave no room for another one under the limit.

        A crowd at its limit still takes requests of a tenant that has less than its share of the limit,
        lest one tenant's flood shut out the others; but never twice the limit.
        """
        if limit is None or num_waiting < limit:
            return False
        if num_waiting >= 2 * limit:
            return True
        return self.part(demand.tenant).num_requests + 1 > limit * self.share(demand)


class FadingCount:
    """A count of events whose older ones fade exponentially."""

    def __init__(self, window: float) -> None:
        """`window`: seconds after which an event counts for 1/e."""
        self._window = window
        self._value = 0.0
        self._time = 0.0

    def read(self, now: float) -> float:
        if now > self._time:
            self._value *= exp((self._time - now) / self._window)
            self._time = now
        return self._value

    def add(self, now: float) -> None:
        self._value = self.read(now) + 1.0


class ClassState:
    """What the door remembers of a class."""

    def __init__(self, priority_class: PriorityClass) -> None:
        self.priority_class = priority_class
        self.crowd = Crowd()
        self.num_running = 0
        self.drain = DrainRate()
        self.seconds_per_token = 0.0
        """From the start of an answer to its end, per output token; 0 until one has been timed."""


class TenantState:
    """What the door remembers of a tenant, over all classes."""

    def __init__(self, policy: TenantPolicy, now: float) -> None:
        self.policy = policy
        self.num_open = 0
        self.level = policy.tokens_per_second * policy.burst
        """Tokens that it may use now; below 0 after one request that was larger than a burst."""
        self._time = now

    def refill(self, now: float) -> None:
        """Time has passed until `now`, in which its rate gave it more to use."""
        rate = self.policy.tokens_per_second
        if rate < inf:
            self.level = min(self.level + rate * max(now - self._time, 0.0), rate * self.policy.burst)
        self._time = max(self._time, now)

    def check(self, demand: Demand, num_waiting: float, retry_after: Callable[[], float]) -> None:
        """Raise OverloadError if the demand is beyond a limit of the tenant's.

        Args:
            demand: the tenant's.
            num_waiting: tokens of its requests that wait.
            retry_after: seconds after which one of its requests will have ended.
        """
        policy, name = self.policy, demand.tenant
        if policy.max_open is not None and self.num_open + demand.num_requests > policy.max_open:
            raise OverloadError(
                "tenant_quota",
                f"tenant {name!r} has {self.num_open} requests open and asks for {demand.num_requests} "
                f"more; its limit is {policy.max_open}",
                retry_after(),
            )
        limit = policy.max_waiting_tokens
        if limit is not None and num_waiting and num_waiting + demand.num_tokens > limit:
            raise OverloadError(
                "tenant_quota",
                f"tenant {name!r} has {num_waiting:.0f} tokens waiting and asks for {demand.num_tokens:.0f} "
                f"more; its limit is {limit}",
                retry_after(),
            )
        # A request beyond a whole burst is let in on a full one, and leaves a debt.
        missing = min(demand.num_tokens, policy.tokens_per_second * policy.burst) - self.level
        if missing > 0.0:
            rate = policy.tokens_per_second
            raise OverloadError(
                "rate",
                f"tenant {name!r} asks for {demand.num_tokens:.0f} tokens and may use "
                f"{max(self.level, 0.0):.0f} now; its limit is {rate:g} tokens a second",
                min(max(missing / rate, SHORTEST_RETRY), LONGEST_RETRY),
            )

    @property
    def forgettable(self) -> bool:
        """Whether a newcomer would be treated alike."""
        full = self.policy.tokens_per_second * self.policy.burst
        return not self.num_open and self.level >= full
