"""Rows times one of a stack of quantised matrices."""

from pallas_kernels.quantised_matmul.api import quantised_matmul
from pallas_kernels.quantised_matmul.nibbles import pack_nibbles, pair_distance, unpack_nibbles

__all__ = ["pack_nibbles", "pair_distance", "quantised_matmul", "unpack_nibbles"]
