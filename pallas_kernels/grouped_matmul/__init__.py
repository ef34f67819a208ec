"""Grouped matmul: rows sorted by group, each group against its own matrix."""

from pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
