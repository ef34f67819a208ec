"""How the numbers of a quantised matrix are stored, and what they are multiplied with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """The static half of a quantised matrix: a number is `(value - zero) * scale`."""

    name: str
    storage: Literal["int8", "float8_e4m3fn", "uint4x2"]
    """The type of the values; uint4x2 is two numbers in each byte, along the last input axis."""
    group: int = 0
    """Most inputs that share a scale; 0 for one scale a channel, a channel being all inputs of one output.
    Where it does not divide a matrix's inputs, the largest size below it that does."""
    zeros: bool = False
    """Whether each group has a zero of its own; otherwise the range is symmetric."""
    int8_rows: bool = False
    """Whether the other factor is rounded to int8 too, each row with a scale of its own, and the products
    are summed as integers; otherwise the matrix is widened to the other factor's type."""

    @property
    def bits(self) -> int:
        """Of a value, its scale aside."""
        return 4 if self.storage == "uint4x2" else 8

    @property
    def scale_bytes(self) -> int:
        """Of one scale. Scales of groups are many, and bfloat16; rounding to four bits loses far more."""
        return 2 if self.group else 4

    def group_size(self, num_inputs: int) -> int:
        """Inputs that share a scale in a matrix of so many."""
        if not self.group:
            return num_inputs
        return next(size for size in range(min(self.group, num_inputs), 0, -1) if num_inputs % size == 0)

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Of a matrix, scales and zeros included."""
        num_groups = num_outputs * num_inputs // self.group_size(num_inputs)
        per_group = self.scale_bytes + (1 if self.zeros else 0)
        return num_outputs * num_inputs * self.bits // 8 + num_groups * per_group


def _formats() -> dict[str, WeightFormat]:
    formats = [
        WeightFormat(name="int8", storage="int8", int8_rows=True),
        WeightFormat(name="int8-weight-only", storage="int8"),
        WeightFormat(name="fp8", storage="float8_e4m3fn"),
    ]
    for group in GROUP_SIZES:
        formats.append(WeightFormat(name=f"int4-{group}", storage="uint4x2", group=group))
        formats.append(WeightFormat(name=f"int4-{group}-zeros", storage="uint4x2", group=group, zeros=True))
    return {format.name: format for format in formats}


FORMATS: Mapping[str, WeightFormat] = _formats()
"""Every format by its name."""


def format_named(name: str) -> WeightFormat:
    """Raises ValueError, listing the names, for one that is not known."""
    if name not in FORMATS:
        raise ValueError(f"weight format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]
