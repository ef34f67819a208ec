"""How the layers of a model are dealt out to the stages of a pipeline.

One program runs on all stages, so each has the same layers as far as their kinds go: the longest run of each
kind that any stage has. What a stage lacks of it is padding, layers whose parameters are all zero: both their
sums add nothing, so hidden states pass unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.config import ModelConfig


@dataclass(frozen=True)
class Stages:
    """The layers of a model by stages."""

    model: ModelConfig
    """The model with the layers of one stage, padding included."""
    layers: tuple[tuple[int | None, ...], ...]
    """For each stage and each of these layers the layer of the whole model; None for padding."""

    def place_of(self, layer: int) -> tuple[int, int]:
        """The stage of a layer of the whole model, and its number there."""
        return next((stage, own.index(layer)) for stage, own in enumerate(self.layers) if layer in own)

    @property
    def num_layers(self) -> int:
        """That all stages have, padding included."""
        return len(self.layers) * self.model.num_layers


@functools.cache
def stages_of(model: ModelConfig, number: int) -> Stages:
    """The layers of a model in so many stages. Repetitions of a pattern stay whole.

    Raises ValueError, naming the sizes, for more stages than there are repetitions.
    """
    if number == 1:
        return Stages(model, (tuple(range(model.num_layers)),))
    units = [
        (segment, range(first, first + len(pattern)))
        for segment, (start, pattern, count) in enumerate(
            (one.first, one.pattern, one.count) for one in model.segments
        )
        for first in range(start, start + len(pattern) * count, len(pattern))
    ]
    if number > len(units):
        raise ValueError(
            f"layers has size {model.num_layers}, in {len(units)} repetitions that stay whole, which are "
            f"fewer than {number} stages"
        )
    sizes = [1] * len(units), [len(unit) for _, unit in units]
    cuts = [_even_cuts(size, number, late) for size in sizes for late in (0.0, 0.5)]
    return min((_deal_out(model, units, cut) for cut in cuts), key=lambda stages: stages.num_layers)


def _even_cuts(sizes: Sequence[int], number: int, late: float) -> list[int]:
    """Where units of these sizes are cut into so many runs of about the same size, none of them empty.

    `late`: the part of a unit from which on it is left to the next run.
    """
    total, cuts, before = sum(sizes), [0], 0
    for place, size in enumerate(sizes):
        left = number - len(cuts)
        due = (before + late * size) * number >= total * len(cuts) or len(sizes) - place == left
        if left and due and place > cuts[-1]:
            cuts.append(place)
        before += size
    return [*cuts, len(sizes)]


def _deal_out(model: ModelConfig, units: Sequence[tuple[int, range]], cuts: Sequence[int]) -> Stages:
    runs = [units[first:end] for first, end in itertools.pairwise(cuts)]
    kinds = []
    layers: list[list[int | None]] = [[] for _ in runs]
    for number, segment in enumerate(model.segments):
        own = [[layer for of, unit in run if of == number for layer in unit] for run in runs]
        longest = max(map(len, own))
        kinds += segment.pattern * (longest // len(segment.pattern))
        for stage, some in zip(layers, own, strict=True):
            stage += [*some, *[None] * (longest - len(some))]
    return Stages(dataclasses.replace(model, layers=tuple(kinds)), tuple(map(tuple, layers)))
