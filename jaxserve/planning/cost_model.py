"""How long a step takes, from what is in it: the roofline of a chip, part by part, and a fixed overhead.

A step is four parts that run one after the other: the layers' matrices, attention, the output head with its
logits, and, on several chips, the sums between them. Each takes the longer of its arithmetic at the chip's
peak and its bytes at the chip's bandwidth, both at the share of the peak that kernels reach in practice.
What XLA fuses away (norms, activations between the matrices) is left out.

Tensor parallelism over `num_chips`: weights, heads and vocabulary are divided evenly; KV heads too, down to
one for a chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxserve.plan import StepShape
from jaxserve.planning.chips import Chip
from jaxserve.planning.footprint import Footprint, bytes_per_weight

ALL_REDUCE_LATENCY = 4e-6
"""Seconds for a sum over chips of next to nothing. An estimate."""
LOGITS_PASSES = 2
"""Times that the float32 logits cross the memory: written by the head, read by sampling."""
_ACTIVATION_BYTES = 2

Counts = npt.NDArray[np.integer[Any]]
"""Whole numbers, one a sequence."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of a chip's peaks that kernels reach. The defaults are estimates from published runs:
    ragged paged attention on TPU 73 % of the arithmetic and 86 % of the bandwidth, decode of 8B models on
    H100 71 to 76 % of the bandwidth."""

    compute: float = 0.6
    memory: float = 0.75

    def __post_init__(self) -> None:
        for name in ("compute", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"efficiency {name} {getattr(self, name)} is not above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step by part."""

    matrices: float
    attention: float
    head: float
    collectives: float
    overhead: float

    @property
    def seconds(self) -> float:
        return self.matrices + self.attention + self.head + self.collectives + self.overhead


class Roofline(NamedTuple):
    """Seconds that a part of a step takes at the least: of its arithmetic, and of its traffic."""

    arithmetic: float
    traffic: float

    @property
    def seconds(self) -> float:
        return max(self)


class CostModel:
    """Times the steps of one model on so many chips of one kind."""

    def __init__(
        self,
        footprint: Footprint,
        chip: Chip,
        *,
        num_chips: int = 1,
        weight_format: str = "bfloat16",
        kv_format: str = "bfloat16",
        compute_format: str = "bfloat16",
        page_size: int = 64,
        efficiency: Efficiency | None = None,
    ) -> None:
        """`compute_format`: what the matrices' operands are multiplied in; int8 weights may be widened first.

        Raises ValueError for an unknown format, a page size that is no power of two, or several chips where
        they are not linked.
        """
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size {page_size} is not a power of two")
        if num_chips < 1 or (num_chips > 1 and not chip.link_bandwidth):
            raise ValueError(
                f"num_chips {num_chips} is out of range for {chip.name}, whose chips stand alone"
            )
        efficiency = efficiency or Efficiency()
        self.footprint = footprint
        self.chip = chip
        self.num_chips = num_chips
        self.weight_format = weight_format
        self.kv_format = kv_format
        self.page_size = page_size
        self._page_shift = page_size.bit_length() - 1
        self._weight_bytes = bytes_per_weight(weight_format)
        self._flops = chip.peak(compute_format) * efficiency.compute * num_chips
        self._attention_flops = chip.peak("bfloat16") * efficiency.compute * num_chips
        self._bandwidth = chip.memory_bandwidth * efficiency.memory * num_chips
        self._kv_bandwidth = self._bandwidth * min(1.0, footprint.model.num_kv_heads / num_chips)
        self._links = chip.link_bandwidth * efficiency.memory
        self._groups = [
            (
                window,
                4 * footprint.model.num_heads * footprint.model.head_size * footprint.layers_of(window),
                footprint.page_bytes(kv_format, page_size, window) / page_size,
            )
            for window in footprint.model.windows
        ]
        self._by_shape: dict[StepShape, tuple[float, float, float]] = {}

    def cost(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> StepCost:
        """The parts of a step.

        Args:
            shape: the compiled step: its rows and logit rows are computed whether they are filled or not.
            starts_S: tokens of each sequence that are in the pool before the step.
            counts_S: rows of each sequence in the step.
        """
        matrices, head, collectives = self._shape_costs(shape)
        attention = sum(part.seconds for part in self._attention(starts_S, counts_S))
        return StepCost(matrices, attention, head, collectives, self.chip.step_overhead)

    def step_seconds(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> float:
        """Seconds from the start of a step on an idle device to its result; arguments as of `cost`."""
        return self.cost(shape, starts_S, counts_S).seconds

    def bottleneck(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> Roofline:
        """The arithmetic and the traffic of a whole step; arguments as of `cost`."""
        parts = (
            self._matrices(shape.rows),
            self._head(shape.logit_rows),
            *self._attention(starts_S, counts_S),
        )
        return Roofline(sum(part.arithmetic for part in parts), sum(part.traffic for part in parts))

    def _shape_costs(self, shape: StepShape) -> tuple[float, float, float]:
        """What depends on the shape alone: matrices, head, collectives."""
        known = self._by_shape.get(shape)
        if known is None:
            matrices, head = self._matrices(shape.rows), self._head(shape.logit_rows)
            known = matrices.seconds, head.seconds, self._collectives(shape.rows)
            self._by_shape[shape] = known
        return known

    def _matrices(self, rows: int) -> Roofline:
        return Roofline(
            2 * self.footprint.active_weights() * rows / self._flops,
            self.footprint.touched_weights(rows) * self._weight_bytes / self._bandwidth,
        )

    def _head(self, logit_rows: int) -> Roofline:
        logits_bytes = LOGITS_PASSES * 4 * logit_rows * self.footprint.model.vocab_size
        return Roofline(
            2 * self.footprint.head_weights * logit_rows / self._flops,
            (self.footprint.head_weights * self._weight_bytes + logits_bytes) / self._bandwidth,
        )

    def _collectives(self, rows: int) -> float:
        """Two sums over the chips for each layer, as rings that run in both directions."""
        if self.num_chips == 1:
            return 0.0
        model = self.footprint.model
        moved = 2 * (self.num_chips - 1) / self.num_chips * rows * model.hidden_size * _ACTIVATION_BYTES
        return 2 * model.num_layers * (ALL_REDUCE_LATENCY + moved / self._links)

    def _attention(self, starts_S: Counts, counts_S: Counts) -> list[Roofline]:
        """Queries by keys, and each sequence's pages read once; new keys and values written. By group."""
        starts = starts_S.astype(np.int64, copy=False)
        ends = starts + counts_S
        num_rows = int(ends.sum() - starts.sum())
        parts: list[Roofline] = []
        for window, flops_per_pair, token_bytes in self._groups:
            pairs = count_pairs(starts, counts_S, window)
            num_pages = int((ends - 1 >> self._page_shift).sum()) + len(ends)
            if window:
                num_pages -= int((np.maximum(starts - window + 1, 0) >> self._page_shift).sum())
            num_tokens = num_pages * self.page_size + num_rows
            arithmetic = flops_per_pair * pairs / self._attention_flops
            parts.append(Roofline(arithmetic, num_tokens * token_bytes / self._kv_bandwidth))
        return parts


def count_pairs(starts_S: Counts, counts_S: Counts, window: int) -> int:
    """Pairs of query and key in one layer, of all sequences together.

    Args:
        starts_S: tokens of each sequence before its rows.
        counts_S: rows of each.
        window: keys that a query sees at most, its own among them; 0 for all.
    """
    starts = starts_S.astype(np.int64, copy=False)
    return _pairs_up_to(starts + counts_S, window) - _pairs_up_to(starts, window)


def _pairs_up_to(lengths_S: Counts, window: int) -> int:
    """Keys that the first so many rows of each sequence see, all together: row i sees min(i + 1, window)."""
    if not window:
        return int(np.dot(lengths_S, lengths_S + 1)) // 2
    short = np.minimum(lengths_S, window)
    return int((short * (short + 1) // 2 + (lengths_S - short) * window).sum())
