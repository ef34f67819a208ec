"""What a collected step brings to its requests: their next tokens, and the ends that these make."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.plan import IntArray
from jaxserve.scheduling.request import Request, RequestState
from jaxserve.scheduling.slots import BoolArray, SlotTable
from jaxserve.scheduling.step import Round


class Arrivals(NamedTuple):
    """Tokens that have reached the host, as columns of equal length."""

    requests: list[Request]
    tokens: list[int]
    rows: list[int]
    """The logit row of each in the step's result."""
    ends: list[RequestState | None]
    """The state in which it ends the answer, if it does."""


def take_tokens(table: SlotTable, part: Round, tokens: IntArray, is_eos: BoolArray) -> Arrivals:
    """Append a round's tokens to its requests; one that ended while the step ran takes none, nor does one for
    which the step has none (-1).

    Args:
        table: the slots, whose requests then have a token less under way.
        part: of a step that has been collected.
        tokens: one for each row of the step's result.
        is_eos: for each token of the vocabulary, whether it is an end-of-sequence id.
    """
    cohort = part.cohort
    slots = cohort.slots
    sampled = tokens[part.rows]
    if not part.foreseen:
        _count(table, part)
    if (sampled < 0).any() or not table.in_place(cohort):
        live = (table.serial[slots] == cohort.serials) & (sampled >= 0)
        return _take_late(table, part, sampled.tolist(), live.tolist())
    table.pending[table.index(slots)] -= 1
    values: list[int] = sampled.tolist()
    for request, token in zip(cohort.requests, values, strict=True):
        request.output.append(token)
    arrived = table.num_arrived(slots)
    stops = (is_eos[sampled] & cohort.ends_at_eos) | cohort.has_stop_ids
    may_end = (arrived >= cohort.max_known) | (stops & (arrived >= cohort.first_end))
    ends: list[RequestState | None] = [None] * len(values)
    for index in may_end.nonzero()[0].tolist():
        ends[index] = cohort.requests[index].end()
    return Arrivals(cohort.requests, values, part.rows.tolist(), ends)


def _count(table: SlotTable, part: Round) -> None:
    """Let the table know of tokens after accepted drafts as if they had been planned.

    While drafts are under way nothing else is planned: who has lost its slot meanwhile has ended.
    """
    slots = part.cohort.slots
    if not table.in_place(part.cohort):
        slots = slots[table.serial[slots] == part.cohort.serials]
    index = table.index(slots)
    for column in (table.known, table.computed, table.pending):
        column[index] += 1


def _take_late(table: SlotTable, part: Round, tokens: list[int], live: list[bool]) -> Arrivals:
    """The same where some have lost their slots since the step was planned."""
    arrivals = Arrivals([], [], [], [])
    columns = zip(part.cohort.requests, tokens, part.rows.tolist(), live, strict=True)
    for request, token, row, in_slot in columns:
        if request.finish_reason is not None or token < 0:
            continue
        if in_slot:
            table.pending[request.slot] -= 1
        else:
            request.num_pending -= 1
        arrivals.requests.append(request)
        arrivals.tokens.append(token)
        arrivals.rows.append(row)
        arrivals.ends.append(request.append(token))
    return arrivals
