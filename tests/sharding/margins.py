"""How near two tokens may lie for other devices to choose the other one."""

from __future__ import annotations

from collections.abc import Sequence

SURE = 1e-3
"""A lead of the likeliest token that rounding in float32 does not take away."""
NEAR = 0.04
"""The same where keys, values and weights are eight bits: sums over devices round otherwise, and then now and
then the numbers that a row is rounded to."""


def parting(answer: Sequence[int], other: Sequence[int], *, strict: bool = True) -> int | None:
    """The first place where two answers differ, or None. Raises ValueError if they are not equally long,
    which without `strict` they need not be."""
    pairs = zip(answer, other, strict=strict)
    return next((place for place, (one, its) in enumerate(pairs) if one != its), None)
