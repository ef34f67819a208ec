"""Ragged paged attention: any mix of prompt chunks and single tokens over a paged KV pool."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cpu import reads_pages_natively
from pallas_kernels.ragged_paged_attention.params import AttentionParams

__all__ = ["AttentionParams", "ragged_paged_attention", "reads_pages_natively"]
