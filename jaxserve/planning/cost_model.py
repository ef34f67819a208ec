"""How long a step takes, from what is in it: the roofline of a chip, part by part, and a fixed overhead.

A step is four parts that run one after the other: the layers' matrices, attention, the output head with its
logits, and, on several chips, what they exchange. Each takes the longer of its arithmetic at the chip's
peak and its bytes at the chip's bandwidth, both at the share of the peak that kernels reach in practice.
What XLA fuses away (norms, activations between the matrices) is left out.

On a mesh, all figures are those of the chip that has most to do:

- tensor: weights, heads and vocabulary are divided evenly, KV heads down to one for a chip.
- expert: likewise, but for attention and its pages, which every chip has whole.
- pipe: a step is so many ticks, in each of which a stage reads its layers for a part of the rows and hands it
  on. Rows that decode are as many groups in turn as there are stages, so that all move on by a token in as
  many ticks, each with a head and an overhead of its own; the host is taken to keep up. Prompts pass in
  parts, while stages wait for the first and the last of them.
- data: a shape is that of each replica, whose weights are its own but for experts that they share out;
  sequences are spread evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxserve.model.stages import stages_of
from jaxserve.plan import StepShape
from jaxserve.planning.chips import Chip
from jaxserve.planning.footprint import Footprint, bytes_per_weight
from jaxserve.planning.meshes import ALONE, ChipMesh
from jaxserve.sizes import num_parts

ALL_REDUCE_LATENCY = 4e-6
"""Seconds for a sum over chips of next to nothing. An estimate."""
LOGITS_PASSES = 2
"""Times that the float32 logits cross the memory: written by the head, read by sampling."""
_ACTIVATION_BYTES = 2
_CHOICE_BYTES = 4 + 4
"""Of an expert that a row has chosen: its number and its weight."""

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

    def times(self, number: float) -> Roofline:
        """Of so many of the same."""
        return Roofline(number * self.arithmetic, number * self.traffic)


class Exchanges(NamedTuple):
    """Of a step, between chips."""

    number: int
    sent_bytes: float
    """By each chip, in rings."""


class Ticks(NamedTuple):
    """How a step passes through stages; a single one of each without stages."""

    number: int
    """In each of which a stage takes one part of the rows through its layers."""
    parts: int
    """Into which the rows are cut."""
    programs: int
    """Dispatches, each with a head of its own."""


class CostModel:
    """Times the steps of one model on so many chips of one kind."""

    def __init__(
        self,
        footprint: Footprint,
        chip: Chip,
        *,
        mesh: ChipMesh = ALONE,
        in_turn: bool = True,
        weight_format: str = "bfloat16",
        kv_format: str = "bfloat16",
        compute_format: str = "bfloat16",
        page_size: int = 64,
        efficiency: Efficiency | None = None,
    ) -> None:
        """Args:
            footprint: of the whole model.
            chip: each of them.
            mesh: along which they share the work.
            in_turn: on stages, groups decode in turn; otherwise, as with drafts, a decode step takes all
                sequences through one stage after the other.
            weight_format, kv_format: what weights and pages are read as.
            compute_format: what the matrices' operands are multiplied in; int8 weights may be widened first.
            page_size: tokens of a page.
            efficiency: of the chip's peaks.

        Raises ValueError for an unknown format, a page size that is no power of two, more stages than the
        model's layers make, or several chips where they are not linked.
        """
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size {page_size} is not a power of two")
        if mesh.size > 1 and not chip.link_bandwidth:
            raise ValueError(f"mesh {mesh.name} is out of range for {chip.name}, whose chips stand alone")
        efficiency = efficiency or Efficiency()
        self.footprint = footprint
        self.chip = chip
        self.mesh = mesh
        self.weight_format = weight_format
        self.kv_format = kv_format
        self.page_size = page_size
        stage = stages_of(footprint.model, mesh.pipe).model
        self.stage = footprint if mesh.pipe == 1 else Footprint.of(stage)
        """Of the layers of one stage, padding among them."""
        self._in_turn = in_turn
        self._platform = "cpu" if chip.is_cpu else "tpu"
        self._page_shift = page_size.bit_length() - 1
        self._weight_bytes = bytes_per_weight(weight_format)
        self._flops = chip.peak(compute_format) * efficiency.compute
        self._bandwidth = chip.memory_bandwidth * efficiency.memory
        self._links = chip.link_bandwidth * efficiency.memory
        self._attention_flops = chip.peak("bfloat16") * efficiency.compute * mesh.tensor
        self._kv_bandwidth = self._bandwidth * self.kv_shards
        self._groups = [
            (
                window,
                4 * footprint.model.num_heads * footprint.model.head_size * self.stage.layers_of(window),
                self.stage.page_bytes(kv_format, page_size, window) / page_size,
            )
            for window in footprint.model.windows
        ]
        self._by_shape: dict[StepShape, tuple[float, float, float]] = {}

    @property
    def kv_shards(self) -> int:
        """Chips among which the KV heads of a layer are shared out; others have the same ones again."""
        return min(self.mesh.tensor, self.footprint.model.num_kv_heads)

    def cost(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> StepCost:
        """The parts of a step.

        Args:
            shape: the compiled step: its rows and logit rows are computed whether they are filled or not.
                Of each replica.
            starts_S: tokens of each sequence that are in the pool before the step, of all replicas.
            counts_S: rows of each sequence in the step.
        """
        matrices, head, collectives = self._shape_costs(shape)
        attention = sum(part.seconds for part in self._attention(shape, starts_S, counts_S))
        overhead = self._ticks(shape).programs * self.chip.step_overhead
        return StepCost(matrices, attention, head, collectives, overhead)

    def step_seconds(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> float:
        """Seconds from the start of a step on an idle device to its result; arguments as of `cost`."""
        return self.cost(shape, starts_S, counts_S).seconds

    def bottleneck(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> Roofline:
        """The arithmetic and the traffic of a whole step; arguments as of `cost`."""
        parts = (
            self._matrices(shape),
            self._head(shape),
            *self._attention(shape, starts_S, counts_S),
        )
        return Roofline(sum(part.arithmetic for part in parts), sum(part.traffic for part in parts))

    def _shape_costs(self, shape: StepShape) -> tuple[float, float, float]:
        """What depends on the shape alone: matrices, head, collectives."""
        known = self._by_shape.get(shape)
        if known is None:
            known = self._matrices(shape).seconds, self._head(shape).seconds, self._exchange_seconds(shape)
            self._by_shape[shape] = known
        return known

    def _ticks(self, shape: StepShape) -> Ticks:
        stages = self.mesh.pipe
        if shape.decode and self._in_turn:
            return Ticks(stages, stages, stages)
        parts = num_parts(shape.rows, stages, self._platform) if stages > 1 and not shape.decode else 1
        return Ticks(parts + stages - 1, parts, 1)

    def _matrices(self, shape: StepShape) -> Roofline:
        ticks = self._ticks(shape)
        rows = -(-shape.rows // ticks.parts)
        of_a_tick = Roofline(
            2 * self.stage.active_weights(self.mesh) * rows / self._flops,
            self.stage.touched_weights(rows, self.mesh) * self._weight_bytes / self._bandwidth,
        )
        return of_a_tick.times(ticks.number)

    def _head(self, shape: StepShape) -> Roofline:
        """The vocabulary is cut along all axes of a replica."""
        programs, chips = self._ticks(shape).programs, self.mesh.size // self.mesh.data
        rows, weights = -(-shape.logit_rows // programs), self.footprint.head_weights
        logits_bytes = LOGITS_PASSES * 4 * rows * self.footprint.model.vocab_size
        of_a_program = Roofline(
            2 * weights * rows / (self._flops * chips),
            (weights * self._weight_bytes + logits_bytes) / (self._bandwidth * chips),
        )
        return of_a_program.times(programs)

    def exchanges(self, shape: StepShape) -> Exchanges:
        """What the chips of a replica say to each other: a sum after the embedding and after both parts of
        each layer, and of stages what each hands on in a tick, and the last one's to all. And where replicas
        share out experts, what they say to each other."""
        mesh, ticks = self.mesh, self._ticks(shape)
        row_bytes = self.footprint.model.hidden_size * _ACTIVATION_BYTES
        entering, of_a_part = (
            -(-shape.rows // number) * row_bytes for number in (ticks.programs, ticks.parts)
        )
        # Where a prompt leaves, only the rows that need logits do.
        leaving = entering if shape.decode else shape.logit_rows * row_bytes
        moves = 0 if mesh.pipe == 1 else ticks.number - (ticks.programs == 1)
        sums = (
            (ticks.number * self.stage.model.num_layers, mesh.tensor, of_a_part),
            (ticks.number * self.stage.model.num_layers, mesh.across, of_a_part),
            (ticks.programs, mesh.pipe * mesh.across, entering),
            (ticks.programs, mesh.pipe, leaving),
        )
        replicas = self._between_replicas(ticks.number, -(-shape.rows // ticks.parts))
        return Exchanges(
            moves + sum(times for times, chips, _ in sums if chips > 1) + replicas.number,
            moves * of_a_part
            + sum(times * 2 * (chips - 1) / chips * num_bytes for times, chips, num_bytes in sums)
            + replicas.sent_bytes,
        )

    def _between_replicas(self, num_ticks: int, rows: int) -> Exchanges:
        """To the experts of all go each one's rows, and what these have chosen and by which weights, in two
        all-gathers; the sums come back in a reduce-scatter. `rows`: of a replica in a tick."""
        model, others = self.stage.model, self.footprint.num_expert_parts(self.mesh) - 1
        layers = num_ticks * sum(kind.experts for kind in model.layers) if others else 0
        row_bytes = 2 * model.hidden_size * _ACTIVATION_BYTES + model.experts_per_token * _CHOICE_BYTES
        return Exchanges(3 * layers, layers * others * rows * row_bytes)

    def _exchange_seconds(self, shape: StepShape) -> float:
        """By rings that run in both directions."""
        exchanges = self.exchanges(shape)
        return (
            exchanges.number * ALL_REDUCE_LATENCY + exchanges.sent_bytes / self._links
            if exchanges.number
            else 0.0
        )

    def _attention(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> list[Roofline]:
        """Queries by keys, and each sequence's pages read once; new keys and values written. By group.

        A stage has its own layers' part of that, and in some ticks that of no rows."""
        ticks = self._ticks(shape)
        share = ticks.number / ticks.parts / max(min(self.mesh.data, len(starts_S)), 1)
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
            whole = Roofline(arithmetic, num_tokens * token_bytes / self._kv_bandwidth)
            parts.append(whole.times(share))
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
