"""Rows of integers times an int8 matrix."""

from pallas_kernels.int8_matmul.api import int8_matmul
from pallas_kernels.int8_matmul.reference import join_halves, split_halves

__all__ = ["int8_matmul", "join_halves", "split_halves"]
