"""The rows that running requests have in a step, on pages that they are given for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.plan import EngineLimits, IntArray
from jaxserve.scheduling.drafting import Drafting
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.replica import Replica
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.slots import SlotTable
from jaxserve.scheduling.step import StepBuilder
from jaxserve.scheduling.step_budget import TokenBudget


class RunningRows:
    """Begins the parts of a step: a row for each request that decodes, then what is left for the others."""

    def __init__(
        self,
        limits: EngineLimits,
        max_chunk: int,
        table: SlotTable,
        queue: RequestQueue,
        replicas: Sequence[Replica],
        budget: TokenBudget,
        drafting: Drafting | None,
    ) -> None:
        self._limits = limits
        self._max_chunk = max_chunk
        self._table = table
        self._queue = queue
        self._replicas = replicas
        self._budget = budget
        self._drafting = drafting

    def plan(
        self, todo: IntArray, now: float, in_flight: Sequence[bool]
    ) -> tuple[list[StepBuilder], list[Request]]:
        """The part of each replica with the rows of its running requests, and those of them that compute
        several.

        Args:
            todo: for each slot the tokens that could be computed.
            now: seconds on the loop's clock.
            in_flight: of each replica, whether a step is under way that it has a part in.
        """
        decoding: list[IntArray] = []
        longer: list[list[int]] = []
        for replica in self._replicas:
            one_each, several = self._sort_out(replica.number, todo)
            decoding.append(replica.pages.find(one_each, now))
            longer.append(several)
        rows, paced = self._max_prompt_rows(decoding, longer)
        steps = [StepBuilder(self._limits, self._table, rows, slots, paced=paced) for slots in decoding]
        if self._drafting is not None:
            for step, several in zip(steps, longer, strict=True):
                step.num_reserved = len(several)
            self._drafting.fill(steps)
        chunked: list[Request] = []
        for replica in self._replicas:
            number = replica.number
            if longer[number]:
                chunked += self._plan_chunks(
                    replica, longer[number], todo, steps[number], now, in_flight[number]
                )
        return steps, chunked

    def iterate(self, steps: Sequence[StepBuilder]) -> None:
        """Let the requests decode several tokens each in one dispatch, as nobody waits and each is on its
        own."""
        most, gated = self._limits.max_iterations, self._table.gated
        if any(not step.decodes_only or gated[step.decoding].any() for step in steps):
            return
        num_ahead = [self._table.num_ahead(step.decoding, most) for step in steps]
        borrowers = list(zip(self._replicas, steps, num_ahead, strict=True))
        if all(replica.pages.can_lend(step.decoding, num) for replica, step, num in borrowers):
            num_iterations = max(int(num.max(initial=1)) for num in num_ahead)
            for replica, step, num in borrowers:
                replica.pages.lend(step.decoding, num)
                step.num_iterations = num_iterations

    def _sort_out(self, replica: int, todo: IntArray) -> tuple[IntArray, list[int]]:
        """The slots of a replica that decode, and those that have several tokens to compute."""
        order = self._table.order_in(replica)
        asked = todo[order]
        one_each = asked == 1
        longer: list[int] = []
        decoding = order
        if not one_each.all():
            longer, decoding = order[asked > 1].tolist(), order[one_each]
        return decoding, longer

    def _max_prompt_rows(self, decoding: Sequence[IntArray], longer: Sequence[list[int]]) -> tuple[int, bool]:
        """Prompt tokens that the next step may compute beside those that decode, of each replica, and whether
        a target of theirs makes them fewer."""
        if not any(longer) and not (self._table.has_free and len(self._queue)):
            return self._max_chunk, False  # Nobody asks.
        targets = self._table.tpot_target
        tightest = min(float(targets[slots].min(initial=np.inf)) for slots in decoding)
        num_decoding = max(map(len, decoding))
        rows = self._budget.budget(num_decoding, tightest)
        return rows, tightest < np.inf and rows < self._budget.budget(num_decoding)

    def _plan_chunks(
        self,
        replica: Replica,
        longer: list[int],
        todo: IntArray,
        step: StepBuilder,
        now: float,
        in_flight: bool,
    ) -> list[Request]:
        """Give these slots of a replica as many rows as there are; return the requests that have some."""
        chunked: list[Request] = []
        for index, slot in enumerate(longer):
            request = self._table.requests[slot]
            if request is None:
                continue  # Preempted by one that decodes.
            step.num_reserved = len(longer) - index - 1
            if self._plan_chunk(replica, request, int(todo[slot]), step, now, in_flight):
                chunked.append(request)
        step.num_reserved = 0
        return chunked

    def _plan_chunk(
        self, replica: Replica, request: Request, todo: int, step: StepBuilder, now: float, in_flight: bool
    ) -> bool:
        """Give the request as many rows as there are; return whether there was one."""
        pages, computed = replica.pages, int(self._table.computed[request.slot])
        if computed >= self._table.next_pass[request.slot]:
            pages.pass_window(request)
        pages.make_free(min(todo, self._max_chunk) // self._limits.page_size + 1)
        # Nobody decodes and nothing is under way: pages will come only from other running requests.
        stuck = step.empty and not in_flight
        available = request.table.num_tokens_available(computed)
        if available < 1 and stuck and pages.make_room(request, now):
            available = request.table.num_tokens_available(computed)
        chunk = step.next_chunk(request, computed, todo, available)
        if chunk.num_tokens < 1:
            return False
        pages.grow(request, computed + chunk.num_tokens)
        step.add(request, chunk, todo)
        return True
