"""How the chips of one engine share its work, as the planner reckons with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass


@dataclass(frozen=True, kw_only=True)
class ChipMesh:
    """Chips along each axis of a mesh, under the names that `sharding.rules` explains."""

    tensor: int = 1
    """Chips among which every layer's matrices and attention heads are shared out."""
    expert: int = 1
    """The same of all but attention, which each of them has whole."""
    pipe: int = 1
    """Stages, each with a run of the layers and their pages."""
    data: int = 1
    """Replicas, each with all weights, and with slots and pages of its own."""

    def __post_init__(self) -> None:
        if min(astuple(self)) < 1:
            raise ValueError(f"{self} has an axis below 1")

    @property
    def size(self) -> int:
        """Chips that it takes."""
        return math.prod(astuple(self))

    @property
    def across(self) -> int:
        """Chips that share out the feed-forward parts of a layer."""
        return self.tensor * self.expert

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Those above 1 with their sizes, as `sharding.MeshAxes`."""
        named = (("data", self.data), ("pipe", self.pipe), ("expert", self.expert), ("tensor", self.tensor))
        return tuple((axis, size) for axis, size in named if size > 1)

    @property
    def name(self) -> str:
        """As `--mesh` of a server takes it."""
        return ",".join(f"{axis}={size}" for axis, size in reversed(self.axes)) or "tensor=1"

    def num_parts(self, axes: Sequence[str | None]) -> int:
        """Into how many parts an array with these logical axes is cut within a stage, if each is divided."""
        cuts = {"kv_heads": self.tensor, "mlp": self.across, "vocab": self.pipe * self.across}
        cuts |= {"experts": self.across}
        return math.prod(cuts.get(axis, 1) for axis in axes if axis is not None)


ALONE = ChipMesh()
"""A single chip."""


def meshes_of(num_chips: int) -> Iterator[ChipMesh]:
    """All of so many chips: first those that cut layers, then those with stages, then those with replicas."""
    factors = [number for number in range(1, num_chips + 1) if num_chips % number == 0]
    for data, pipe, expert in itertools.product(factors, repeat=3):
        if num_chips % (data * pipe * expert) == 0:
            tensor = num_chips // (data * pipe * expert)
            yield ChipMesh(tensor=tensor, expert=expert, pipe=pipe, data=data)
