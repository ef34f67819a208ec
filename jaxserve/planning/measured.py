"""Step times that were measured on a machine instead of reckoned from its peaks.

On a CPU the roofline is far off between one row and many: a product of four rows takes several times as long
as one of a single row though it reads the same weights. So each rung of the ladder has its own figures, of
the layers and of what is there once a step, and attention goes by its pairs of query and key.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from jaxserve.plan import StepShape
from jaxserve.planning.chips import Chip
from jaxserve.planning.cost_model import CostModel, Counts, Efficiency, StepCost, count_pairs
from jaxserve.planning.footprint import Footprint


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One shape of step as it was timed: full, its sequences' contexts as short as they can be."""

    rows: int
    decode: bool
    layer_seconds: float
    """Of one layer, attention included, in the mean over the model's kinds of layers."""
    other_seconds: float
    """Of what a step does once: embedding, head, sampling, and its way to the device and back."""
    pairs: int
    """Of query and key in each layer of the step that was timed."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What one machine takes for the steps of one model in one precision."""

    rungs: tuple[Rung, ...]
    decode_pair_seconds: float
    """Of a pair of query and key, all heads, in one layer: rows that are their sequence's only one."""
    chunk_pair_seconds: float
    """Of rows that share their sequence with others."""

    def rung(self, shape: StepShape) -> Rung:
        """That of a shape, or between those of the next smaller and larger one of its kind.

        Beyond the largest one it goes on in proportion. Raises ValueError if no shape of the kind was timed.
        """
        known = [rung for rung in self.rungs if rung.decode == shape.decode]
        if not known:
            raise ValueError(f"no {'decode' if shape.decode else 'chunk'} step was timed")
        place = bisect_left(known, shape.rows, key=lambda rung: rung.rows)
        if place == len(known):
            return _stretched(known[-1], shape.rows)
        if place == 0 or known[place].rows == shape.rows:
            return known[place]
        return _between(known[place - 1], known[place], shape.rows)


def _stretched(rung: Rung, rows: int) -> Rung:
    factor = rows / rung.rows
    return Rung(
        rows=rows,
        decode=rung.decode,
        layer_seconds=factor * rung.layer_seconds,
        other_seconds=factor * rung.other_seconds,
        pairs=round(factor * rung.pairs),
    )


def _between(low: Rung, high: Rung, rows: int) -> Rung:
    share = (rows - low.rows) / (high.rows - low.rows)
    return Rung(
        rows=rows,
        decode=low.decode,
        layer_seconds=low.layer_seconds + share * (high.layer_seconds - low.layer_seconds),
        other_seconds=low.other_seconds + share * (high.other_seconds - low.other_seconds),
        pairs=round(low.pairs + share * (high.pairs - low.pairs)),
    )


class MeasuredCost(CostModel):
    """Times the steps of one model on one machine by what its rungs took."""

    def __init__(self, footprint: Footprint, chip: Chip, times: StepTimes, **settings: Any) -> None:
        """`settings`: as for `CostModel`. The chip's peaks only say what a step is bound by."""
        super().__init__(footprint, chip, efficiency=Efficiency(compute=1.0, memory=1.0), **settings)
        self._times = times

    def cost(self, shape: StepShape, starts_S: Counts, counts_S: Counts) -> StepCost:
        """As of `CostModel`; `head` is all that a step does once."""
        times, footprint = self._times, self.footprint
        rung, num_layers = times.rung(shape), footprint.model.num_layers
        single = counts_S == 1
        attention = 0.0
        for window in footprint.model.windows:
            alone = count_pairs(starts_S[single], counts_S[single], window)
            shared = count_pairs(starts_S[~single], counts_S[~single], window)
            seconds = times.decode_pair_seconds * alone + times.chunk_pair_seconds * shared
            attention += footprint.layers_of(window) * seconds
        timed_pair = times.decode_pair_seconds if shape.decode else times.chunk_pair_seconds
        layer = max(rung.layer_seconds - timed_pair * rung.pairs, 0.0)
        return StepCost(layer * num_layers, attention, rung.other_seconds, 0.0, 0.0)


def fit_times(
    shallow: dict[StepShape, float],
    deep: dict[StepShape, float],
    num_layers: tuple[int, int],
    *,
    decode_pair_seconds: float,
    chunk_pair_seconds: float,
    pairs: dict[StepShape, int],
) -> StepTimes:
    """Rungs from the seconds that steps of two models take which differ in their depth alone.

    Args:
        shallow, deep: seconds by shape. Chunk shapes that the shallow one lacks do once what its largest one
            does. None at all: `deep` is the whole model, of which nothing has to be told apart.
        num_layers: of the two.
        decode_pair_seconds, chunk_pair_seconds, pairs: as in `StepTimes` and `Rung`.
    """
    few, many = num_layers
    once: dict[StepShape, float] = {}
    for shape, seconds in shallow.items():
        layer = max(deep[shape] - seconds, 0.0) / (many - few)
        once[shape] = max(seconds - few * layer, 0.0)
    largest = max((shape.rows for shape in once if not shape.decode), default=0)
    most = next((once[shape] for shape in once if shape.rows == largest and not shape.decode), 0.0)
    rungs: list[Rung] = []
    for shape, seconds in deep.items():
        other = once.get(shape, most)
        rungs.append(
            Rung(
                rows=shape.rows,
                decode=shape.decode,
                layer_seconds=max(seconds - other, 0.0) / many,
                other_seconds=other,
                pairs=pairs[shape],
            )
        )
    return StepTimes(
        rungs=tuple(sorted(rungs, key=lambda rung: (rung.decode, rung.rows))),
        decode_pair_seconds=max(decode_pair_seconds, 0.0),
        chunk_pair_seconds=max(chunk_pair_seconds, 0.0),
    )
