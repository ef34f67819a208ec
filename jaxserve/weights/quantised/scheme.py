"""How one linear module of a checkpoint has its weight in several tensors, and what that is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxserve.quantization import WeightFormat, weight_format

FLOATS = ("F32", "F16", "BF16")
INT4_ZERO = 8
"""What stands for zero in four bits where a matrix has no zeros of its own."""


@dataclass(frozen=True)
class Expected:
    """What a tensor of a module must be."""

    shapes: tuple[tuple[int, ...], ...]
    encodings: tuple[str, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], *encodings: str) -> Expected:
        return cls((shape,), encodings)


@dataclass(frozen=True)
class Matrix:
    """A weight `[out, in]`, each number `(value - zero) * scale`, the scale and the zero its group's."""

    values: np.ndarray
    """`[out, in]`: uint8 of 0 to 15 for four bits, else int8 or float8_e4m3fn."""
    scales: np.ndarray
    """`[out, groups]`, floating point."""
    zeros: np.ndarray | None
    """`[out, groups]` in the values' type; None where all are `INT4_ZERO` in four bits, 0 in eight."""
    group_of: np.ndarray | None = None
    """`[in]`: each input's group; None where groups are runs of equal length."""

    def widened(self) -> np.ndarray:
        """Float32 `[out, in]`."""
        numbers = self.values.astype(np.float32, order="C")
        # A view with an axis of groups, or of single inputs where these are in any order.
        grouped, scales, zeros = numbers[..., None], self.scales, self.zeros
        if self.group_of is None:
            grouped = numbers.reshape(*self.scales.shape, -1)
        else:
            scales = scales[:, self.group_of]
            zeros = None if zeros is None else zeros[:, self.group_of]
        if zeros is not None:
            grouped -= zeros[..., None].astype(np.float32)
        elif self.values.dtype == np.uint8:
            grouped -= INT4_ZERO
        grouped *= scales[..., None].astype(np.float32)
        return numbers


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """What the modules of a checkpoint, or some of them, have in common.

    The names of a module's tensors are the module's and one more word each.
    """

    method: str
    """The `quant_method` that it comes from."""
    kind: Literal["int", "float"] = "int"
    bits: int
    group: int = 0
    """Inputs that share a scale; 0 for all of them."""
    zeros: bool = False
    """Whether groups have zeros of their own."""
    int8_rows: bool = False
    """Whether activations are meant to be rounded to int8, row by row."""
    permuted: bool = False
    """Whether each input names its group: then no format holds the matrix."""

    @property
    def label(self) -> str:
        """What the numbers are, without the method: int4-128, say."""
        base = "e4m3" if self.kind == "float" else f"int{self.bits}"
        weight_only = "-weight-only" if base == "int8" and not self.int8_rows and not self.group else ""
        return f"{base}{weight_only}{self._group_label()}{'-actorder' if self.permuted else ''}"

    def _group_label(self) -> str:
        return f"-{self.group}" if self.group else ""

    def format(self, num_inputs: int, scale_encodings: set[str]) -> WeightFormat | None:
        """What holds the matrices exactly, given how their scales are stored; None where nothing does."""
        if self.permuted:
            return None
        base = "int4" if self.bits == 4 else "w8a8" if self.int8_rows else "int8-weight-only"
        return weight_format(
            "fp8" if self.kind == "float" else base,
            group=self.group_in(num_inputs),
            zeros=self.zeros,
            scale_type="bfloat16" if scale_encodings == {"BF16"} else "float32",
        )

    def group_in(self, num_inputs: int) -> int:
        """Inputs that share a scale in a matrix of so many, as it is kept; 0 for all of them."""
        return self.group

    def num_groups(self, num_inputs: int) -> int:
        """Of a row. Raises ValueError where they do not come out even."""
        if self.group and num_inputs % self.group:
            raise ValueError(f"has {num_inputs} inputs, expected a multiple of the group size {self.group}")
        return num_inputs // self.group if self.group else 1

    def main(self, module: str) -> str:
        """The tensor with the values."""
        return f"{module}.{next(iter(self.suffixes))}"

    @property
    @abstractmethod
    def suffixes(self) -> tuple[str, ...]:
        """The last words of the tensors' names: that of the values first, of the scales second."""

    @abstractmethod
    def tensors(self, shape: tuple[int, int]) -> Mapping[str, Expected]:
        """The tensors of a module with a weight `[out, in]`, by the last words of their names.

        Raises ValueError, saying what was expected, for a shape that the scheme cannot have.
        """

    @abstractmethod
    def read(self, found: Mapping[str, np.ndarray], shape: tuple[int, int]) -> Matrix:
        """The weight that these tensors are.

        Raises ValueError, naming the tensor by its last word, for numbers that contradict the scheme.
        """
