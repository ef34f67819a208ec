"""Traffic that is no steady load: each kind is a record of settings that plans its own requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jaxserve.bench.asks import Ask, Draw
from jaxserve.bench.traffic import arrival_times
from jaxserve.scheduling.settings import check_ranges, number, whole

Breakable = Literal["grammar-checker", "command"]
BREAKABLE: tuple[Breakable, ...] = ("grammar-checker", "command")
_MAX_TOKENS = 2**20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a request is in tokens, and how it is sampled."""

    uncached: int = whole(64, 1, _MAX_TOKENS)
    prefix: int = whole(0, 0, _MAX_TOKENS)
    """Shared by all requests of a run: the first of them computes it."""
    output: int = whole(32, 1, _MAX_TOKENS)
    sampling: str = "greedy"

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Fault:
    """Something that breaks while requests run."""

    breaks: Breakable
    at: float
    """Seconds from the start of the run."""
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scenario(Shape, ABC):
    """One kind of traffic. Raises ValueError for a setting out of range."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def num_requests(self) -> int: ...

    @property
    def concurrency(self) -> int | None:
        """Requests that the client keeps open at most; None for no limit."""
        return None

    @property
    def fault(self) -> Fault | None:
        return None

    @property
    def tenants(self) -> tuple[str, ...]:
        """Whose tokens the requests bring."""
        return ()

    @abstractmethod
    def asks(self, draw: Draw, parameters: Mapping[str, Any]) -> list[Ask]:
        """The requests in the order of their arrivals. `parameters`: of the sampling that is named."""

    def _ask(self, draw: Draw, prefix: list[int], parameters: Mapping[str, Any], **more: Any) -> Ask:
        settings: dict[str, Any] = {
            "token_ids": prefix + draw.tokens(self.uncached),
            "max_tokens": self.output,
            "sampling": {**parameters, "seed": draw.whole()},
        }
        return Ask(**settings | more)


@dataclass(frozen=True, kw_only=True)
class Burst(Scenario):
    """So many at once, again and again."""

    kind: ClassVar[str] = "burst"
    size: int = whole(8, 1, 100_000)
    bursts: int = whole(3, 1, 10_000)
    every: float = number(2.0, 0.0, 1e5)
    """Seconds from one to the next."""

    @property
    def num_requests(self) -> int:
        return self.size * self.bursts

    def asks(self, draw: Draw, parameters: Mapping[str, Any]) -> list[Ask]:
        prefix = draw.tokens(self.prefix)
        return [
            self._ask(draw, prefix, parameters, arrival=number * self.every)
            for number in range(self.bursts)
            for _ in range(self.size)
        ]


@dataclass(frozen=True, kw_only=True)
class Cancellations(Scenario):
    """Some clients leave in the middle of their answers; the figures are those of the others."""

    kind: ClassVar[str] = "cancellations"
    requests: int = whole(16, 1, 100_000)
    at_once: int = whole(8, 1, 100_000)
    share: float = number(0.5, 0.0, 1.0)
    """Of those that leave."""
    after: int = whole(4, 1, _MAX_TOKENS)
    """Pieces of their answer."""

    @property
    def num_requests(self) -> int:
        return self.requests

    @property
    def concurrency(self) -> int:
        return self.at_once

    def asks(self, draw: Draw, parameters: Mapping[str, Any]) -> list[Ask]:
        prefix = draw.tokens(self.prefix)
        leaving = draw.chosen(self.requests, self.share)
        return [
            self._ask(
                draw,
                prefix,
                parameters,
                group="leaves" if number in leaving else "stays",
                leave_after=self.after if number in leaving else None,
            )
            for number in range(self.requests)
        ]


@dataclass(frozen=True, kw_only=True)
class Retries(Scenario):
    """All at once; who is refused for now comes again when the server says, and says that it is a retry."""

    kind: ClassVar[str] = "retries"
    requests: int = whole(24, 1, 100_000)
    attempts: int = whole(4, 1, 100)

    @property
    def num_requests(self) -> int:
        return self.requests

    def asks(self, draw: Draw, parameters: Mapping[str, Any]) -> list[Ask]:
        prefix = draw.tokens(self.prefix)
        return [self._ask(draw, prefix, parameters, attempts=self.attempts) for _ in range(self.requests)]


@dataclass(frozen=True, kw_only=True)
class Tenants(Scenario):
    """Tenants of unequal appetite beside each other."""

    kind: ClassVar[str] = "tenants"
    requests: int = whole(24, 1, 100_000)
    rate: float = number(8.0, 1e-3, 1e6)
    """Arrivals a second, a Poisson process."""
    shares: Mapping[str, float] = field(default_factory=lambda: {"heavy": 0.75, "light": 0.25})
    """Of the requests, by tenant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.shares, Mapping) or not self.shares:
            raise ValueError(f"shares {self.shares!r} is not a table of tenants")
        for name, share in self.shares.items():
            if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
                raise ValueError(f"shares.{name} {share!r} is not a number above 0")

    @property
    def num_requests(self) -> int:
        return self.requests

    @property
    def tenants(self) -> tuple[str, ...]:
        return tuple(self.shares)

    def asks(self, draw: Draw, parameters: Mapping[str, Any]) -> list[Ask]:
        prefix = draw.tokens(self.prefix)
        weights = [share / sum(self.shares.values()) for share in self.shares.values()]
        who = draw.rng.choice(list(self.shares), self.requests, p=weights).tolist()
        arrivals = arrival_times(self.requests, self.rate, 1.0, draw.whole())
        return [
            self._ask(draw, prefix, parameters, arrival=at, tenant=name, group=name)
            for name, at in zip(who, arrivals, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Inversions(Scenario):
    """Urgent requests among a steady stream of patient ones: an inversion is one that a later patient one
    overtakes to the first token."""

    kind: ClassVar[str] = "inversions"
    patient: int = whole(24, 1, 100_000)
    patient_output: int = whole(64, 1, _MAX_TOKENS)
    urgent: int = whole(8, 1, 100_000)
    seconds: float = number(4.0, 0.0, 1e5)
    """Over which both arrive evenly."""
    patient_class: str = "batch"
    urgent_class: str = "interactive"

    @property
    def num_requests(self) -> int:
        return self.patient + self.urgent

    def asks(self, draw: Draw, parameters: Mapping[str, Any]) -> list[Ask]:
        prefix = draw.tokens(self.prefix)
        patient = [
            self._ask(
                draw,
                prefix,
                parameters,
                arrival=number * self.seconds / self.patient,
                max_tokens=self.patient_output,
                priority=self.patient_class,
                group="patient",
            )
            for number in range(self.patient)
        ]
        urgent = [
            self._ask(
                draw,
                prefix,
                parameters,
                arrival=(number + 0.5) * self.seconds / self.urgent,
                priority=self.urgent_class,
                group="urgent",
            )
            for number in range(self.urgent)
        ]
        return sorted(patient + urgent, key=lambda ask: ask.arrival)


@dataclass(frozen=True, kw_only=True)
class Failure(Scenario):
    """Something that the server depends on breaks while requests arrive evenly.

    The grammar checker is a process of the server's own, which is ended by force: requests have grammars that
    it must check. A command ends whatever it does, such as the first model of a route that has a fallback.
    """

    kind: ClassVar[str] = "failure"
    requests: int = whole(16, 1, 100_000)
    rate: float = number(8.0, 1e-3, 1e6)
    """Arrivals a second."""
    breaks: Breakable = "grammar-checker"
    at: float = number(1.0, 0.0, 1e5)
    """Seconds from the start of the run."""
    command: tuple[str, ...] = ()
    """Program and arguments, which no shell reads."""
    attempts: int = whole(1, 1, 100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.breaks not in BREAKABLE:
            raise ValueError(f"breaks {self.breaks!r} is not known; there are {', '.join(BREAKABLE)}")
        if (self.breaks == "command") != bool(self.command):
            raise ValueError(f"command {list(self.command)} and breaks {self.breaks!r} do not go together")
        if not all(isinstance(part, str) for part in self.command):
            raise ValueError(f"command {list(self.command)} is not a list of texts")

    @property
    def num_requests(self) -> int:
        return self.requests

    @property
    def fault(self) -> Fault:
        return Fault(self.breaks, self.at, self.command)

    def asks(self, draw: Draw, parameters: Mapping[str, Any]) -> list[Ask]:
        prefix = draw.tokens(self.prefix)
        needs_grammar = self.breaks == "grammar-checker"
        # Each a grammar of its own: the server remembers those that it has compiled.
        return [
            self._ask(
                draw,
                prefix,
                parameters,
                arrival=number / self.rate,
                attempts=self.attempts,
                group="before" if number / self.rate < self.at else "after",
                regex=f"{draw.whole()} [a-z ]*" if needs_grammar else None,
            )
            for number in range(self.requests)
        ]


SCENARIOS: Mapping[str, type[Scenario]] = {
    one.kind: one for one in (Burst, Cancellations, Retries, Tenants, Inversions, Failure)
}
