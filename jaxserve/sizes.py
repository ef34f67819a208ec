"""Sizes that an engine has where nobody says otherwise; the planner plans with the same."""

from __future__ import annotations

from typing import NamedTuple


class DefaultSizes(NamedTuple):
    """Of an engine."""

    num_slots: int
    page_size: int
    max_chunk: int
    """Rows of the largest step."""


_ON_CPU = DefaultSizes(num_slots=16, page_size=16, max_chunk=256)
_ELSEWHERE = DefaultSizes(num_slots=64, page_size=64, max_chunk=1024)
FEW_SLOTS = 4
DRAFT_ROWS = (2, 4, 8, 16, 32)
"""Rows of steps that verify drafts: few more than they have are to be padding."""

ROWS_OF_A_PART = {"cpu": 16, "tpu": 256, "gpu": 256}
"""Below which a part of a step in stages takes nearly as long as one of so many rows: the matrices must be
read either way."""


def default_sizes(*, on_cpu: bool) -> DefaultSizes:
    """What is meant where a size is left out."""
    return _ON_CPU if on_cpu else _ELSEWHERE


def ladder(lowest: int, highest: int) -> tuple[int, ...]:
    """Sizes four apart, the last one exactly `highest`."""
    rungs: list[int] = []
    rung = lowest
    while rung < highest:
        rungs.append(rung)
        rung *= 4
    return (*rungs, max(lowest, highest))


def chunk_ladder(num_slots: int, highest: int, *, on_cpu: bool) -> tuple[int, ...]:
    """Rows of the steps that take chunks of prompts."""
    # Every rung is a program to compile or read: with few sequences, starting fast matters more.
    rungs = ladder(16 if num_slots > FEW_SLOTS else 64, highest)
    if not on_cpu or num_slots == 1:
        return rungs
    # Rows that are padding take as long there as others, and others wait: a hundred tokens need no 256.
    return tuple(sorted({*rungs, max(rungs[0], highest // 2)}))


def num_parts(num_rows: int, num_stages: int, platform: str) -> int:
    """Into how many parts a step's rows are best cut that pass through stages: the more, the less stages wait
    for each other, until the parts are so small that each takes as long as a larger one."""
    wanted = min(2 * num_stages, num_rows // ROWS_OF_A_PART[platform])
    return next((parts for parts in range(wanted, 1, -1) if num_rows % parts == 0), 1)
