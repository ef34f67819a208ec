"""Shares of the service: who has had how much.

Each tenant of a class, and each class as a whole, has an *account* with a counter: the tokens that it was
served, weighted, and divided by its share. Whoever has the lowest counter is served next. A counter is
raised to the others' when its owner comes back after an absence, so that nobody saves up for a burst
(Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

An answer is paid for as it starts, by what is expected of it, and settled when it ends. Paid as it comes, it
would show too late: the owner of the lowest counter starts one request after another until the first of them
have run up a debt, and is then shut out until the others have caught up.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from jaxserve.scheduling.classes import SchedulerPolicy

_MAX_IDLE = 1024
"""Accounts kept for tenants without a request; the longest idle are given to newcomers."""


class Accounts:
    """The counters of all classes and of their tenants. Account `c` is that of class `c` itself.

    A tenant's account belongs to it while it is open (`open` and `close` count), and a while longer.
    """

    def __init__(self, policy: SchedulerPolicy) -> None:
        self._policy = policy
        self._num_classes = len(policy.classes)
        self._numbers: dict[tuple[int, str], int] = {}
        self._names: list[tuple[int, str]] = [(index, "") for index in range(self._num_classes)]
        self._num_open = [0] * self._num_classes
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._counters = np.zeros(64)
        self._rates = np.zeros(64)  # What a weighted token adds to the account's counter.
        self._parents = np.zeros(64, np.int64)
        self._credits = np.zeros(64)  # Weighted tokens that were paid for and not used, for the next ones.
        for index, one in enumerate(policy.classes):
            self._rates[index] = 1.0 / one.share

    def index(self, tenant: str, class_index: int) -> int:
        """The account of a tenant in a class; it stays the tenant's until its requests have ended."""
        number = self._numbers.get((class_index, tenant))
        return self._create(tenant, class_index) if number is None else number

    def open(self, account: int) -> None:
        """The account's tenant has one more request."""
        self._num_open[account] += 1
        self._idle.pop(account, None)

    def close(self, account: int) -> None:
        """One of the tenant's requests has ended."""
        self._num_open[account] -= 1
        if not self._num_open[account]:
            self._idle[account] = None

    def counter(self, account: int) -> float:
        """Weighted tokens served, over the share, raised by the absences."""
        return self._counters.item(account)

    def charge(self, accounts: npt.NDArray[np.integer], num_output: npt.NDArray[np.integer] | int) -> None:
        """Output tokens served to each of [requests] requests, whose accounts may repeat."""
        weights = None if isinstance(num_output, int) else num_output
        served = np.bincount(accounts, weights, len(self._counters)).astype(np.float64)
        if isinstance(num_output, int):
            served *= num_output
        served[: self._num_classes] += np.bincount(self._parents, served, self._num_classes)
        self._counters += served * (self._policy.output_weight * self._rates)

    def charge_prompt(self, account: int, num_tokens: int) -> None:
        """Prompt tokens of one request, charged as it starts so that the next choice knows of them."""
        self._charge_one(account, num_tokens * self._policy.prompt_weight)

    def charge_answer(self, account: int, num_tokens: int) -> None:
        """Output tokens of one request that are yet to come."""
        self._charge_one(account, num_tokens * self._policy.output_weight)

    def refund_answer(self, account: int, num_tokens: int) -> None:
        """Of the output tokens that one request has paid for, so many never came.

        They are taken off what the account is charged next: a counter never goes down.
        """
        for number in (account, self._parents.item(account)):
            self._credits[number] += num_tokens * self._policy.output_weight

    def lift(self, account: int, level: float) -> None:
        """The owner comes back among others who have had `level`: what it did not use is gone."""
        self._counters[account] = max(self._counters.item(account), level)

    def _charge_one(self, account: int, weighted: float) -> None:
        for number in (account, self._parents.item(account)):
            used = min(weighted, self._credits.item(number))
            self._credits[number] -= used
            self._counters[number] += (weighted - used) * self._rates[number]

    def _create(self, tenant: str, class_index: int) -> int:
        if len(self._idle) > _MAX_IDLE:
            number, _ = self._idle.popitem(last=False)
            del self._numbers[self._names[number]]
        else:
            number = len(self._names)
            self._names.append((class_index, tenant))
            self._num_open.append(0)
            if number == len(self._counters):
                self._grow()
        self._names[number] = (class_index, tenant)
        self._numbers[class_index, tenant] = number
        self._counters[number] = self._credits[number] = 0.0
        self._rates[number] = 1.0 / self._policy.tenant(tenant).weight
        self._parents[number] = class_index
        self._idle[number] = None
        return number

    def _grow(self) -> None:
        self._counters = np.concatenate([self._counters, np.zeros_like(self._counters)])
        self._credits = np.concatenate([self._credits, np.zeros_like(self._credits)])
        self._rates = np.concatenate([self._rates, np.zeros_like(self._rates)])
        self._parents = np.concatenate([self._parents, np.zeros_like(self._parents)])
