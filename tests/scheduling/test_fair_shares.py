"""Accounts of tenants and classes, and the division of a step's rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduling.classes import PriorityClass, SchedulerPolicy
from jaxserve.scheduling.fair_shares import Accounts, share_rows

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


@pytest.mark.parametrize(
    ("num_rows", "wanted", "granted"),
    [
        (160, [1000, 1000, 1000, 1000], [93, 45, 6, 16]),
        (160, [0, 0, 0, 1000], [0, 0, 0, 160]),
        (160, [10, 0, 0, 1000], [10, 0, 0, 150]),
        (160, [10, 20, 30, 40], [10, 20, 30, 40]),
        (1, [5, 5, 5, 5], [1, 0, 0, 0]),
        (0, [5, 5, 5, 5], [0, 0, 0, 0]),
    ],
)
def test_rows_go_by_floor_and_share(num_rows: int, wanted: list[int], granted: list[int]) -> None:
    assert share_rows(num_rows, wanted, POLICY) == granted


CLASSES = st.lists(
    st.tuples(st.floats(0.01, 100), st.floats(0, 0.2), st.integers(0, 3), st.integers(0, 500)),
    min_size=1,
    max_size=4,
)


@given(CLASSES, st.integers(0, 600))
def test_no_row_is_lost_and_every_floor_holds(
    drawn: list[tuple[float, float, int, int]], num_rows: int
) -> None:
    classes = tuple(
        PriorityClass(name=str(index), share=share, reserved=reserved, rank=rank)
        for index, (share, reserved, rank, _) in enumerate(drawn)
    )
    wanted = [want for *_, want in drawn]
    granted = share_rows(num_rows, wanted, SchedulerPolicy(classes=classes))
    assert sum(granted) == min(num_rows, sum(wanted))
    for one, want, grant in zip(classes, wanted, granted, strict=True):
        assert min(want, int(one.reserved * num_rows)) <= grant <= want
