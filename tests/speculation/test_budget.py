"""What drafting may lose is bounded, whatever it is tried on."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from jaxserve.speculation.budget import DraftingBudget


@given(st.lists(st.floats(-3.0, 0.0), min_size=50, max_size=400))
def test_where_it_only_loses_the_loss_is_a_small_part_of_the_time(losses: list[float]) -> None:
    budget, lost, worst = DraftingBudget(), 0.0, max(-loss for loss in losses)
    for num_steps, loss in enumerate(losses, 1):
        if budget.open:
            budget.settle(loss)
            lost -= loss
        else:
            budget.earn(1)
        assert lost <= 0.5 + 0.015 * num_steps + worst


def test_what_it_has_saved_it_may_lose_again_up_to_a_limit() -> None:
    budget = DraftingBudget()
    for _ in range(100):
        budget.settle(0.5)
    num_losses = 0
    while budget.open:
        budget.settle(-0.5)
        num_losses += 1
    assert num_losses == 16


def test_what_a_step_costs_and_brings_counts_together() -> None:
    budget = DraftingBudget()
    for _ in range(10):
        budget.settle(-0.6)
        budget.settle(0.7)
        assert budget.open


def test_it_is_tried_again() -> None:
    budget = DraftingBudget()
    budget.settle(-0.6)
    assert not budget.open
    num_steps = 0
    while not budget.open:
        budget.earn(1)
        num_steps += 1
    assert 30 <= num_steps <= 45
    budget.settle(-0.6)
    assert not budget.open
