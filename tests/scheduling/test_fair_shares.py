"""Accounts of tenants and classes, and the division of a step's rows."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.fair_shares import Accounts

POLICY = SchedulerPolicy.from_mapping({"tenants": {"big": {"weight": 2}}})
INTERACTIVE, DEFAULT = 0, 1


def test_tokens_are_weighted_and_divided_by_shares() -> None:
    accounts = Accounts(POLICY)
    big, small = accounts.index("big", DEFAULT), accounts.index("small", DEFAULT)
    other = accounts.index("small", INTERACTIVE)
    assert len({big, small, other}) == 3
    assert accounts.index("big", DEFAULT) == big

    accounts.charge_prompt(big, 100)
    accounts.charge(np.array([big, small, small, other]), np.array([1, 2, 3, 4]))
    assert accounts.counter(big) == (100 + 2 * 1) / 2
    assert accounts.counter(small) == 2 * (2 + 3)
    assert accounts.counter(other) == 2 * 4
    assert accounts.counter(DEFAULT) == (100 + 2 * 6) / 4
    assert accounts.counter(INTERACTIVE) == 2 * 4 / 8

    accounts.charge(np.array([big, small, small]), 1)
    assert accounts.counter(big) == 51 + 1
    assert accounts.counter(small) == 10 + 4
    assert accounts.counter(DEFAULT) == 28 + 6 / 4


def test_a_lift_never_lowers() -> None:
    accounts = Accounts(POLICY)
    account = accounts.index("a", DEFAULT)
    accounts.lift(account, 5.0)
    assert accounts.counter(account) == 5.0
    accounts.lift(account, 3.0)
    assert accounts.counter(account) == 5.0


def test_accounts_of_those_who_left_are_used_again_and_of_those_who_are_here_never() -> None:
    accounts = Accounts(POLICY)
    resident = accounts.index("resident", DEFAULT)
    accounts.open(resident)
    accounts.charge_prompt(resident, 7)
    highest = 0
    for number in range(10_000):
        account = accounts.index(f"guest {number}", DEFAULT)
        assert account != resident
        assert accounts.counter(account) == 0.0
        accounts.open(account)
        accounts.charge_prompt(account, 10)
        accounts.close(account)
        highest = max(highest, account)
    assert highest < 1100
    assert accounts.index("resident", DEFAULT) == resident
    assert accounts.counter(resident) == 7.0


def test_what_was_paid_for_and_not_used_pays_for_what_comes_next() -> None:
    accounts = Accounts(POLICY)
    big = accounts.index("big", DEFAULT)
    accounts.charge_answer(big, 100)
    assert (accounts.counter(big), accounts.counter(DEFAULT)) == (100, 50)
    accounts.refund_answer(big, 60)
    assert accounts.counter(big) == 100, "a counter never goes down"
    accounts.charge_prompt(big, 50)  # An output token counts for two.
    assert accounts.counter(big) == 100
    accounts.charge_prompt(accounts.index("small", DEFAULT), 90)
    assert accounts.counter(DEFAULT) == 50 + (90 - 70) / 4, "the class had 70 left"
    accounts.charge_answer(big, 40)
    assert accounts.counter(big) == 100 + (80 - 70) / 2
