"""Rows of integers times an int8 matrix."""

from pallas_kernels.int8_matmul.api import int8_matmul, rounded_int8_matmul
from pallas_kernels.int8_matmul.reference import SMALLEST_SCALE, join_halves, quantise_rows, split_halves

__all__ = [
    "SMALLEST_SCALE",
    "int8_matmul",
    "join_halves",
    "quantise_rows",
    "rounded_int8_matmul",
    "split_halves",
]
