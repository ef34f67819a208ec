"""The static half of the operation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionParams:
    """What is static about one layer's attention."""

    scale: float
    """Factor on the scores."""
    window: int = 0
    """Sliding window in tokens, the query's own included; 0 is full attention."""
    softcap: float = 0.0
    """Scores become softcap * tanh(scores / softcap); 0 leaves them."""
    context_block: int = 128
    """Positions reduced at a time; the order of reduction depends on nothing else."""
    query_tile: int = 16
    """Rows of a sequence that share a gather of its context."""
    exact_order: bool = False
    """A row's sums are added in an order that depends on its own context alone: the reference multiplies and
    reduces instead of a dot, whose order varies with its shape."""
