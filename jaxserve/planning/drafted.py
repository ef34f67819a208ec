"""What steps take when answers are drafted and a share of the drafts is accepted."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from jaxserve.plan import EngineLimits, StepShape
from jaxserve.planning.cost_model import CostModel, Counts, Roofline
from jaxserve.sizes import DRAFT_ROWS
from jaxserve.speculation.gain import worthwhile_counts


class DraftedSteps:
    """Times steps: one that decodes takes what verifying drafts costs for each token that comes of it.

    A simulated step brings each sequence one token. One that verifies drafts brings more in more time; what
    passes for the simulation is its time by its tokens, so that answers come as fast as they would.
    """

    def __init__(
        self,
        cost: CostModel,
        limits: EngineLimits,
        *,
        acceptance: float,
        max_drafts: int,
        host_seconds: float,
    ) -> None:
        """Args:
            cost: what steps take.
            limits: the engine's, for the shapes that verify.
            acceptance: how likely a draft is accepted if those before it are.
            max_drafts: most drafts of a sequence in a step.
            host_seconds: what the host takes for a step, which drafts must wait for.

        Raises ValueError for an acceptance outside of [0, 1), or no drafts.
        """
        if not 0 <= acceptance < 1:
            raise ValueError(f"an acceptance of {acceptance:g} is out of range: it must be from 0 to below 1")
        if max_drafts < 1:
            raise ValueError(f"max_drafts {max_drafts} is below 1")
        self._cost = cost
        self._num_replicas = limits.num_replicas
        self._rows = sorted({*DRAFT_ROWS, *(shape.rows for shape in limits.chunk_shapes)})
        self._acceptance = acceptance
        self._max_drafts = max_drafts
        self._host_seconds = host_seconds
        self._chosen: dict[tuple[int, int], Counts] = {}

    def step_seconds(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> float:
        """As of `CostModel.step_seconds`."""
        plain = self._cost.step_seconds(shape, starts_S, counts_S)
        drafts = self._drafts(shape, starts_S)
        if not drafts.any():
            return plain
        verify = self._verify_shape(len(drafts), int(drafts.sum()))
        seconds = self._cost.step_seconds(verify, starts_S, drafts + 1) + self._host_seconds
        return min(plain, seconds * len(drafts) / self._expected_tokens(drafts))

    def bottleneck(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> Roofline:
        """As of `CostModel.bottleneck`, of the step that verifies where there is one."""
        drafts = self._drafts(shape, starts_S)
        if not drafts.any():
            return self._cost.bottleneck(shape, starts_S, counts_S)
        verify = self._verify_shape(len(drafts), int(drafts.sum()))
        return self._cost.bottleneck(verify, starts_S, drafts + 1)

    def _drafts(self, shape: StepShape, starts_S: Counts) -> Counts:
        """How many drafts of each sequence are worth their rows: what the scheduler's own rule says.

        Contexts of about the same length are not told apart.
        """
        num = len(starts_S)
        if not shape.decode:
            return np.zeros(num, np.int64)
        key = num, int(starts_S.sum()).bit_length()
        if key not in self._chosen:
            self._chosen[key] = worthwhile_counts(
                [self._acceptance] * num,
                [self._max_drafts] * num,
                max(min(num * self._max_drafts, self._num_replicas * self._rows[-1] - num), 0),
                self._timer(shape, starts_S),
                num_decoding=num,
            )
        return self._chosen[key]

    def _timer(self, shape: StepShape, starts_S: Counts) -> Callable[[int, int], float]:
        """Seconds of a step by its number of drafts and the most of a sequence; only its shape matters."""
        num = len(starts_S)
        plain = self._cost.step_seconds(shape, starts_S, np.ones(num, np.int64))

        @functools.cache
        def of_shape(verify: StepShape) -> float:
            rows = np.full(num, verify.rows // num)
            return self._cost.step_seconds(verify, starts_S, rows) + self._host_seconds

        return lambda drafts, _most: of_shape(self._verify_shape(num, drafts)) if drafts else plain

    def _verify_shape(self, num_sequences: int, num_drafts: int) -> StepShape:
        """Of each replica, which has its part of both."""
        needed = -(-(num_sequences + num_drafts) // self._num_replicas)
        rows = next(rung for rung in self._rows if rung >= needed)
        return StepShape(rows, -(-num_sequences // self._num_replicas), rows)

    def _expected_tokens(self, drafts_S: Counts) -> float:
        """Of a step: one a sequence, and each draft if it and all before it are accepted."""
        rate = self._acceptance
        return float(np.sum((1 - rate ** (drafts_S + 1.0)) / (1 - rate)))
