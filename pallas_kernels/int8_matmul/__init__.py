"""Rows of int8 times an int8 matrix."""

from pallas_kernels.int8_matmul.api import int8_matmul

__all__ = ["int8_matmul"]
