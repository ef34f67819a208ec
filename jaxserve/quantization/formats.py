"""How the numbers of a quantised matrix are stored, and what they are multiplied with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GROUP_SIZES = (32, 64, 128)

Storage = Literal["int8", "float8_e4m3fn", "uint4x2"]
ScaleType = Literal["float32", "bfloat16", "float16"]
_SUFFIXES: Mapping[ScaleType, str] = {"float32": "-f32", "bfloat16": "", "float16": "-f16"}


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """The static half of a quantised matrix: a number is `(value - zero) * scale`, or `value * scale + zero`
    where zeros are minima."""

    name: str
    storage: Storage
    """The type of the values; uint4x2 is two numbers in each byte, along the last input axis."""
    group: int = 0
    """Most inputs that share a scale; 0 for one scale a channel, a channel being all inputs of one output.
    Where it does not divide a matrix's inputs, the largest size below it that does."""
    zeros: bool = False
    """Whether each group has a zero of its own; otherwise the range is symmetric."""
    minima: bool = False
    """Whether that zero is the group's smallest number, a float of the scales' type, instead of a value."""
    row_bits: Literal[0, 8, 12] = 0
    """To how many bits the other factor is rounded, each row with a scale of its own, for the products to be
    summed as integers; 0 for not: then the matrix is widened to the other factor's type. The few large
    numbers of a row leave the others little of 8 bits; with 12 next to nothing is lost."""
    scale_type: ScaleType = "float32"
    """Of the scales."""

    @property
    def bits(self) -> int:
        """Of a value, its scale aside."""
        return 4 if self.storage == "uint4x2" else 8

    @property
    def scale_bytes(self) -> int:
        """Of one scale."""
        return 4 if self.scale_type == "float32" else 2

    @property
    def zero_type(self) -> Literal["int8", "uint8"] | ScaleType:
        """Of the zeros: as values are counted, from 0 up for four bits, around 0 for eight; of minima, as the
        scales."""
        if self.minima:
            return self.scale_type
        return "uint8" if self.bits == 4 else "int8"

    def group_size(self, num_inputs: int) -> int:
        """Inputs that share a scale in a matrix of so many."""
        if not self.group:
            return num_inputs
        return next(size for size in range(min(self.group, num_inputs), 0, -1) if num_inputs % size == 0)

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Of a matrix, scales and zeros included."""
        num_groups = num_outputs * num_inputs // self.group_size(num_inputs)
        zero_bytes = self.scale_bytes if self.minima else 1
        per_group = self.scale_bytes + (zero_bytes if self.zeros else 0)
        return num_outputs * num_inputs * self.bits // 8 + num_groups * per_group


_STORAGE: Mapping[str, Storage] = {
    "int8": "int8",
    "w8a8": "int8",
    "int8-weight-only": "int8",
    "fp8": "float8_e4m3fn",
    "int4": "uint4x2",
}
_ROW_BITS: Mapping[str, Literal[8, 12]] = {"int8": 12, "w8a8": 8}
_NAME = re.compile(
    r"(?P<base>int8-weight-only|int8|w8a8|fp8|int4)(-(?P<group>[1-9]\d*))?"
    r"(?P<zeros>-zeros|-minima)?(?P<scales>-f32|-f16)?"
)


def weight_format(
    base: str,
    *,
    group: int = 0,
    zeros: bool = False,
    minima: bool = False,
    scale_type: ScaleType = "float32",
) -> WeightFormat:
    """The format with a kind of values, a group size, zeros and a type of scales, under its own name.

    Args:
        base: int8 and w8a8 (whose other factor is rounded too, to 12 and to 8 bits), int8-weight-only, fp8 or
            int4.
        group: inputs that share a scale; 0 for channels.
        zeros: whether each group has a zero.
        minima: whether it has one that is its smallest number.
        scale_type: of groups' scales; those of channels are few, and float32.

    Raises ValueError for int8 with groups or zeros, and for fp8 with zeros: no product is made of them.
    """
    scale_type = scale_type if group else "float32"
    zeros = zeros or minima
    of_zeros = "-minima" if minima else "-zeros" if zeros else ""
    suffix = f"{f'-{group}' if group else ''}{of_zeros}"
    name = base + suffix + (_SUFFIXES[scale_type] if group else "")
    row_bits = _ROW_BITS.get(base) or 0
    if suffix and row_bits:
        raise ValueError(f"weight format {name!r}: rows of integers need one scale a channel, and no zeros")
    if zeros and base == "fp8":
        raise ValueError(f"weight format {name!r}: fp8 has no zeros")
    return WeightFormat(
        name=name,
        storage=_STORAGE[base],
        group=group,
        zeros=zeros,
        minima=minima,
        row_bits=row_bits,
        scale_type=scale_type,
    )


def _formats() -> dict[str, WeightFormat]:
    formats = [weight_format(base) for base in ("int8", "w8a8", "int8-weight-only", "fp8")]
    for group in GROUP_SIZES:
        # Scales of groups are many, and rounding to four bits loses far more than bfloat16 does.
        formats += [
            weight_format("int4", group=group, zeros=zeros, scale_type="bfloat16") for zeros in (False, True)
        ]
    formats.append(weight_format("fp8", group=128, scale_type="bfloat16"))
    return {format.name: format for format in formats}


FORMATS: Mapping[str, WeightFormat] = _formats()
"""Every format that arrays are rounded to, by its name. Checkpoints may hold matrices in further ones."""


def format_named(name: str) -> WeightFormat:
    """The format of a name: one of `FORMATS`, or one that `weight_format` gives it.

    Raises ValueError, listing the former, for one that is not known.
    """
    if name in FORMATS:
        return FORMATS[name]
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"weight format {name!r} is not one of {', '.join(FORMATS)}")
    return weight_format(
        match["base"],
        group=int(match["group"] or 0),
        zeros=match["zeros"] is not None,
        minima=match["zeros"] == "-minima",
        scale_type=next(kind for kind, suffix in _SUFFIXES.items() if suffix == (match["scales"] or "")),
    )
