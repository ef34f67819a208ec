"""What a plan is for, by name: this machine's CPU, or some chips of one kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxserve.planning.chips import CHIPS, Chip, find_chip

CPU = "cpu"
_NAME = re.compile(r"([a-z0-9]+)(?:-(\d+))?")
MOST_CHIPS = 256
USUAL_MESH = 8
"""Chips of one engine where nobody asks for more and so many hold the model: an NVLink domain, a TPU host."""


@dataclass(frozen=True)
class PlanTarget:
    """Some chips of one kind."""

    kind: str
    num_chips: int | None
    """None for as many as it takes."""

    @classmethod
    def parse(cls, name: str) -> PlanTarget:
        """From `cpu`, a kind of chip such as `v6e`, or a number of them such as `v6e-8`.

        Raises ValueError, with what there is, for anything else.
        """
        kinds = [kind for kind, chip in CHIPS.items() if chip.link_bandwidth]
        match = _NAME.fullmatch(name)
        if name == CPU:
            return cls(CPU, 1)
        if match is None or match[1] not in kinds:
            raise ValueError(
                f"target {name!r} is not one of {CPU}, {', '.join(kinds)}, the latter followed by -N for N "
                "chips if there are only so many"
            )
        num_chips = None if match[2] is None else int(match[2])
        if num_chips is not None and not 1 <= num_chips <= MOST_CHIPS:
            raise ValueError(f"target {name!r}: a plan is for 1 to {MOST_CHIPS} chips")
        return cls(match[1], num_chips)

    @property
    def is_cpu(self) -> bool:
        """Whether it is this machine, which is measured, instead of one whose peaks are known."""
        return self.kind == CPU

    def chip(self) -> Chip:
        """The chip's peaks. Only for those that are known."""
        return find_chip(self.kind)

    def mesh_sizes(self) -> Iterator[int]:
        """Numbers of chips that one engine can have: powers of two."""
        most = self.num_chips or MOST_CHIPS
        return (2**power for power in range(most.bit_length()) if 2**power <= most)
