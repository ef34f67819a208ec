"""When drafting goes on and when it rests: it may lose a little time, and some of what it has saved."""

from __future__ import annotations

_ALLOWANCE = 0.015
"""Of the time of steps without drafting, what trying to draft may lose."""
_STAKE = 0.5
"""In plain steps, what is at stake each time that drafting is tried."""
_MOST = 8.0
"""In plain steps, how much of what has been saved lately may be lost again before drafting rests."""
_TERM = 32
"""Steps over which most of what has been invested is paid back."""


class Debt:
    """What has been spent for the steps to come, which pay it back little by little."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """So much has been spent."""
        self._seconds += seconds

    def pay(self) -> float:
        """Seconds that one more step has to pay."""
        paid = self._seconds / _TERM
        self._seconds -= paid
        return paid


class DraftingBudget:
    """A balance in plain steps, which what drafting saves raises and what it loses lowers.

    At nothing left, drafting rests until the steps without it have earned the next try.
    """

    __slots__ = ("_balance", "_open")

    def __init__(self) -> None:
        self._balance = _STAKE
        self._open = True

    @property
    def open(self) -> bool:
        """Whether drafting goes on; to be asked when all that a step has cost and brought is settled."""
        return self._open and self._balance > 0.0

    def earn(self, num_steps: float) -> None:
        """So many steps were as without drafting."""
        going_on = self.open
        self._balance = min(self._balance + _ALLOWANCE * num_steps, _MOST)
        self._open = going_on or self._balance >= _STAKE

    def settle(self, num_steps: float) -> None:
        """Drafting has saved the time of so many plain steps; below 0 it has lost it."""
        self._balance = min(self._balance + num_steps, _MOST)
