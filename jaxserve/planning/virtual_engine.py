"""An engine without a device: steps take the time that a model of cost says, on a clock of its own.

It stands where the real engine stands, under the real scheduler and loop, and checks nothing: a simulated
hour is as long as its host code. Answers are one token repeated, ended after as many as the request's seed
says (`answer_seed`), so that neither the scheduler nor the loop knows beforehand how long one will be.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jaxserve.plan import EngineLimits, IntArray, SlotLoad, StepHandle, StepPlan, StepResult, StepShape
from jaxserve.planning.cost_model import CostModel, Counts
from jaxserve.planning.prompts import ANSWER_TOKEN
from jaxserve.sizes import chunk_ladder, ladder

StepTimer = Callable[[StepShape, Counts, Counts], float]
"""Seconds of a step: its shape, each sequence's tokens in the pool before it, each sequence's rows."""

END_TOKEN = 1
"""The end-of-sequence id of the model that is not there."""

MEMORY_SHARE = 0.9
"""Of a chip's memory, what weights and pages may take: the rest is for what steps need meanwhile."""


class VirtualClock:
    """Seconds that pass only when told to. Calling it reads it, as a loop's clock is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, time: float) -> None:
        """Let time pass up to `time`, if it lies ahead."""
        self.now = max(self.now, time)


def answer_seed(output_tokens: int) -> int:
    """The seed with which a virtual engine ends an answer after so many tokens."""
    return output_tokens


class VirtualEngine:
    """A StepEngine on a virtual clock."""

    def __init__(
        self, limits: EngineLimits, step_seconds: StepTimer, clock: VirtualClock, *, host_seconds: float = 0.0
    ) -> None:
        """`host_seconds`: what the host takes to plan a step and to commit one, spent at each dispatch."""
        self._limits = limits
        self._step_seconds = step_seconds
        self._clock = clock
        self._host_seconds = host_seconds
        self._known = np.zeros(limits.num_slots, np.int64)
        self._computed = np.zeros(limits.num_slots, np.int64)
        self._end_at = np.zeros(limits.num_slots, np.int64)
        self._free_at = 0.0
        self._nothing = np.zeros((_most_logit_rows(limits), limits.max_logprobs), np.float32)
        self._no_tokens = self._nothing.astype(np.int32)
        self.busy_seconds = 0.0
        """Time that the device has been given to do."""
        self.num_dispatched = 0
        self.num_collected = 0
        self.num_computed_tokens = 0
        """Rows computed, padding aside."""

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def load_slot(self, load: SlotLoad) -> None:
        slot = load.slot
        self._known[slot] = len(load.tokens)
        self._computed[slot] = load.num_computed
        self._end_at[slot] = load.num_prompt_tokens + load.seed

    def load_masks(
        self, slots: IntArray, masks: npt.NDArray[np.uint32], ahead: IntArray | None = None
    ) -> None:
        """Takes no time here, and no tokens are told apart."""

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Queue a step behind what the device has to do, once the host has spent its time."""
        slots, counts = plan.slots, plan.num_tokens
        starts = self._computed[slots]
        seconds = self._step_seconds(plan.shape, starts, counts)
        self._clock.advance_to(self._clock.now + self._host_seconds)
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self.busy_seconds += seconds
        self.num_dispatched += 1
        self.num_computed_tokens += plan.num_rows
        return StepHandle(plan, (self._free_at, self._sample(plan, starts + counts)))

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait until the step is done."""
        done_at, tokens = handle.device_result
        self._clock.advance_to(done_at)
        self.num_collected += 1
        num = len(tokens)
        return StepResult(tokens, self._nothing[:num, 0], tokens, self._no_tokens[:num], self._nothing[:num])

    def _sample(self, plan: StepPlan, computed: Counts) -> IntArray:
        """The step's tokens; a sequence whose known tokens are all computed gets one more."""
        slots = plan.slots
        self._computed[slots] = computed
        known = self._known[slots]
        known += known == computed
        self._known[slots] = known
        tokens = np.where(known == self._end_at[slots], END_TOKEN, ANSWER_TOKEN).astype(np.int32)
        num_rows = int(plan.num_logit_rows.sum())
        if num_rows == len(tokens):
            return tokens
        rows = np.full(num_rows, ANSWER_TOKEN, np.int32)
        rows[np.cumsum(plan.num_logit_rows) - 1] = tokens
        return rows


def _most_logit_rows(limits: EngineLimits) -> int:
    shapes = limits.decode_shapes + limits.chunk_shapes
    return limits.num_replicas * max(shape.logit_rows for shape in shapes)


def virtual_limits(
    cost: CostModel,
    *,
    num_slots: int = 256,
    max_model_len: int | None = None,
    max_chunk: int = 1024,
    memory_share: float = MEMORY_SHARE,
    weight_bytes: float | None = None,
) -> EngineLimits:
    """What an engine on these chips would state: the pool fills what the weights leave of the memory.

    `num_slots` are those of all replicas; `weight_bytes` those of a chip, by default an even part of what the
    cost model's weight format makes of the model. Shapes are as the engine compiles them; on stages a decode
    step is one of all groups. Raises ValueError, with the bytes, for weights that do not fit or a pool that
    cannot hold one sequence of `max_model_len`, and for slots that replicas do not divide.
    """
    footprint = cost.footprint
    model = footprint.model
    length = max_model_len or model.max_position
    if not 2 <= length <= model.max_position:
        raise ValueError(f"max_model_len {length} is out of range: the model takes 2 to {model.max_position}")
    replicas = cost.mesh.data
    if num_slots % replicas:
        raise ValueError(f"{num_slots} slots are not divided by the {replicas} replicas of {cost.mesh.name}")
    own_slots = num_slots // replicas
    if weight_bytes is None:
        weight_bytes = footprint.weight_bytes(cost.weight_format) / (cost.mesh.size / replicas)
    num_pages = _pool_pages(
        cost,
        own_slots,
        length,
        max_chunk + own_slots,
        usable=memory_share * cost.chip.memory_bytes,
        weights=weight_bytes,
    )
    decode = ladder(1, own_slots)
    chunk = chunk_ladder(own_slots, max(max_chunk, own_slots), on_cpu=cost.chip.is_cpu)
    return EngineLimits(
        num_slots=num_slots,
        num_replicas=replicas,
        max_model_len=length,
        page_size=cost.page_size,
        num_pages=num_pages,
        windows=model.windows,
        vocab_size=model.vocab_size,
        decode_shapes=tuple(StepShape(rows, rows, rows, decode=True) for rows in decode),
        chunk_shapes=tuple(StepShape(rows, min(rows, own_slots), min(rows, own_slots)) for rows in chunk),
        max_logprobs=1,
        eos_token_ids=(END_TOKEN,),
        copies_pages=True,
    )


def _pool_pages(
    cost: CostModel, num_slots: int, length: int, step_rows: int, *, usable: float, weights: float
) -> tuple[int, ...]:
    """Pages of each cache group: what all slots could ever hold, or in proportion what the memory allows."""
    windows = cost.footprint.model.windows
    page_bytes = [cost.stage.page_bytes(cost.kv_format, cost.page_size, w) / cost.kv_shards for w in windows]
    longest = [min(length, window + step_rows) if window else length for window in windows]
    whole = [num_slots * -(-tokens // cost.page_size) + 2 for tokens in longest]
    share = min(
        1.0, (usable - weights) / sum(pages * size for pages, size in zip(whole, page_bytes, strict=True))
    )
    num_pages = tuple(int(pages * share) for pages in whole)
    if any(
        pages - 1 < -(-tokens // cost.page_size) for pages, tokens in zip(num_pages, longest, strict=True)
    ):
        raise ValueError(
            f"{cost.mesh.size} x {cost.chip.name} has {usable:.3g} bytes a "
            f"chip to use, of which the weights take {weights:.3g}; what is left does not hold a sequence "
            f"of {length} tokens: more chips, a smaller format or a smaller max_model_len would do"
        )
    return num_pages
