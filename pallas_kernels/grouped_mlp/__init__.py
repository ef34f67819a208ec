"""Grouped MLP: rows through the gated feed-forward parts that they chose, and back, weighted."""

from pallas_kernels.grouped_mlp.api import grouped_mlp

__all__ = ["grouped_mlp"]
