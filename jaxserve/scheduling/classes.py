"""What requests are entitled to: priority classes, tenants, retries, and the policy that holds them.

None of this reaches an answer. It decides only when a request is served, and whether it is let in.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Literal

from jaxserve.scheduling.settings import check_keys, check_ranges, number, read_record, read_table, whole
from jaxserve.scheduling.terms import ServiceTerms

Order = Literal["fair", "fcfs", "longest-prefix"]
ORDERS: tuple[Order, ...] = ("fair", "fcfs", "longest-prefix")
_WAITING_PART = 0.4
"""Of a target for the first token, what the queue may take by the door's prediction, which is off by some
tenths. Simulated traffic far beyond saturation is served in time most often with 0.3 to 0.45; 0.6 serves a
tenth less, 1.0 a third less."""
_WAITING_PART_IN_A_BURST = 0.8
"""The same while a backlog is rare: those behind a burst do not wait for this one."""
RETRY_CLASS = "retry"
"""The class of a request whose caller was refused before, unless its own is less urgent still."""


@dataclass(frozen=True, kw_only=True)
class PriorityClass:
    """One level of urgency. Raises ValueError, naming the value and the limit, for anything out of range."""

    name: str
    rank: int = whole(1, 0, 1000)
    """0 is the most urgent. Ties go to the lower rank; preemption begins at the highest."""
    share: float = number(1.0, 1e-3, 1e6)
    """Weight of the class among those that have work, in tokens served."""
    reserved: float = number(0.0, 0.0, 1.0)
    """Part of the slots in use that is the class's before all others while it has work. Others use it while
    it has none."""
    max_wait: float = number(60.0, 0.0, inf)
    """Seconds in the queue after which a request goes next, whatever the shares say."""
    max_predicted_wait: float | None = number(None, 0.0, inf)
    """Predicted seconds in the queue beyond which a request is refused at the door: see `patience`."""
    ttft_target: float = number(inf, 0.0, inf)
    """Seconds from arrival to the first token that are aimed at."""
    tpot_target: float = number(inf, 0.0, inf)
    """Seconds between tokens that are aimed at: prompts are cut so that steps are no longer."""
    expected_output: int = whole(256, 1)
    """Tokens of a typical answer, until finished ones have taught better."""
    max_waiting: int | None = whole(None, 0)
    """Requests that may wait for a slot."""
    max_waiting_tokens: int | None = whole(None, 0)
    """Prompt and expected output tokens of those that wait."""
    max_waiting_pools: float = number(inf, 0.0, inf)
    """Pages that those that wait are predicted to need, as a multiple of the whole pool."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("the name of a class is empty")
        check_ranges(self)

    def patience(self, *, standing: bool) -> float:
        """Seconds that a request may be let in to wait: `max_predicted_wait` or, where that is None, as much
        of the target for the first token as leaves time for the prompt; never more than `max_wait`.

        `standing`: whether others always wait; if they seldom do, more of the target may be used up.
        """
        part = _WAITING_PART if standing else _WAITING_PART_IN_A_BURST
        wait = part * self.ttft_target if self.max_predicted_wait is None else self.max_predicted_wait
        return min(self.max_wait, wait)


DEFAULT_CLASSES = (
    PriorityClass(
        name="interactive",
        rank=0,
        share=8.0,
        reserved=0.25,
        max_wait=10.0,
        ttft_target=1.0,
        tpot_target=0.05,
        max_waiting=1024,
        max_waiting_pools=4.0,
    ),
    PriorityClass(
        name="default",
        rank=1,
        share=4.0,
        reserved=0.125,
        max_wait=60.0,
        ttft_target=5.0,
        max_waiting=4096,
        max_waiting_pools=16.0,
    ),
    PriorityClass(
        name=RETRY_CLASS,
        rank=2,
        share=1.0,
        max_wait=60.0,
        ttft_target=5.0,
        max_waiting=1024,
        max_waiting_pools=4.0,
    ),
    PriorityClass(name="batch", rank=3, share=1.0, reserved=0.0625, max_wait=3600.0, max_waiting=65536),
)


@dataclass(frozen=True, kw_only=True)
class TenantPolicy:
    """What one tenant may have. Raises ValueError as `PriorityClass` does."""

    weight: float = number(1.0, 1e-3, 1e6)
    """Of its share among the tenants of a class, in tokens served."""
    max_open: int | None = whole(None, 0)
    """Requests, waiting and running."""
    max_waiting_tokens: int | None = whole(None, 0)
    """Prompt and expected output tokens of its requests that wait."""
    tokens_per_second: float = number(inf, 1e-3, inf)
    """Prompt and output tokens, averaged over `burst` seconds."""
    burst: float = number(60.0, 1e-3, 1e6)
    """Seconds at `tokens_per_second` that may be used at once."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class RetryBudget:
    """How many retries are let in while others wait, so that refusals do not feed the overload."""

    ratio: float = number(0.2, 0.0, 1.0)
    """Retries admitted for each first try admitted within the window."""
    window: float = number(60.0, 1e-3, 1e6)
    """Seconds over which both are counted (older ones fade exponentially)."""
    at_least: int = whole(10, 0)
    """Retries admitted within the window however few the first tries."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class SchedulerPolicy:
    """Who goes next, and who is turned away. Raises ValueError for what contradicts itself."""

    order: Order = "fair"
    """"fair" is the product; the other two are here to be compared with it."""
    classes: tuple[PriorityClass, ...] = DEFAULT_CLASSES
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict[str, TenantPolicy])
    other_tenants: TenantPolicy = TenantPolicy()
    """For tenants that are not named."""
    retries: RetryBudget = RetryBudget()
    prompt_weight: float = number(1.0, 0.0, 1e3)
    """What a prompt token counts for in the shares."""
    output_weight: float = number(2.0, 0.0, 1e3)
    """What an output token counts for: it costs a row of a step of its own."""
    max_waiting: int | None = whole(None, 0)
    """Requests of all classes that may wait for a slot."""
    max_passed: int = whole(4, 0)
    """How many requests may start ahead of one that is next and for which there is no room."""
    max_preemptions: int = whole(4, 0)
    """A request that has been preempted so often is no victim while there is another."""
    pages_ahead: float = number(0.5, 0.0, 1.0)
    """Of the output that is expected of requests beyond their known tokens, the part for which pages are kept
    when others start. All of it would be right if every answer were longest at the same time."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r} is not known; there are {', '.join(ORDERS)}")
        if not self.classes:
            raise ValueError("classes is empty: a request needs a class")
        if len(self._index) < len(self.classes):
            raise ValueError(f"two classes share a name: {[one.name for one in self.classes]}")
        reserved = sum(one.reserved for one in self.classes)
        if not reserved < 1.0:
            # One slot at least stays open to whoever has waited too long.
            raise ValueError(f"the classes reserve {reserved} of the slots; the limit is below 1")

    @classmethod
    def first_come(cls) -> SchedulerPolicy:
        """Strictly by arrival, as engines without classes do."""
        return cls(order="fcfs", max_passed=0, pages_ahead=0.0)

    @classmethod
    def longest_prefix(cls) -> SchedulerPolicy:
        """The longest cached prompt first, as engines do that schedule for their prefix cache."""
        return cls(order="longest-prefix", max_passed=0, pages_ahead=0.0)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> SchedulerPolicy:
        """The default policy with what `settings` changes.

        Keys are the fields' names; `classes` and `tenants` are tables by name, where a known class keeps
        what is not named and a new one starts from `PriorityClass`'s defaults. Raises ValueError that
        names the key, the value and the limit.
        """
        table = read_table(settings, "the policy")
        check_keys(table, set(cls.__dataclass_fields__), "")
        values = dict(table)
        if "classes" in values:
            values["classes"] = _read_classes(values["classes"])
        if "tenants" in values:
            values["tenants"] = {
                name: read_record(TenantPolicy(), entry, f"tenants.{name}")
                for name, entry in read_table(values["tenants"], "tenants").items()
            }
        if "other_tenants" in values:
            values["other_tenants"] = read_record(TenantPolicy(), values["other_tenants"], "other_tenants")
        if "retries" in values:
            values["retries"] = read_record(RetryBudget(), values["retries"], "retries")
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> SchedulerPolicy:
        """The policy in a `.toml` or `.json` file. Raises ValueError, naming the file, as `from_mapping`."""
        readers = {".toml": tomllib.loads, ".json": json.loads}
        if path.suffix not in readers:
            raise ValueError(f"{path}: a policy is a .toml or .json file")
        try:
            return cls.from_mapping(readers[path.suffix](path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def class_index(self, terms: ServiceTerms) -> int:
        """Position in `classes` of a request's class.

        A retry is of class "retry", where there is one, unless it would gain by that. Raises ValueError for
        a priority that is no class.
        """
        index = self._index.get(terms.priority)
        if index is None:
            names = ", ".join(self._index)
            raise ValueError(f"priority {terms.priority!r} is not a class; there are {names}")
        if terms.is_retry:
            retry = self._index.get(RETRY_CLASS, index)
            if self.classes[retry].rank > self.classes[index].rank:
                return retry
        return index

    def priority_class(self, terms: ServiceTerms) -> PriorityClass:
        """The class that a request belongs to. Raises ValueError as `class_index` does."""
        return self.classes[self.class_index(terms)]

    def tenant(self, name: str) -> TenantPolicy:
        return self.tenants.get(name, self.other_tenants)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {one.name: index for index, one in enumerate(self.classes)}


def _read_classes(entries: Any) -> tuple[PriorityClass, ...]:
    classes = {one.name: one for one in DEFAULT_CLASSES}
    for name, entry in read_table(entries, "classes").items():
        base = classes.get(name) or PriorityClass(name=name)
        classes[name] = replace(read_record(base, entry, f"classes.{name}"), name=name)
    return tuple(classes.values())
