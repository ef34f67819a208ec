"""One row, for XLA on CPU: its dots of a few rows take 25 to 30 us, or wake another thread for as little.

The sums are written out, over slices of 16 numbers, as XLA vectorises nothing that it reduces itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams
from pallas_kernels.ragged_paged_attention.reference import Sums, attend_reference

_SLICE = 16


def obstacle(
    *, layout: PageLayout, params: AttentionParams, num_rows: int, single: bool, **_: object
) -> str | None:
    """Why this cannot do it, or is no way to do it, or None."""
    if num_rows != 1 or not single:
        return f"{num_rows} rows, not one"
    if params.exact_order:
        return "the exact order of summation is the reference's"
    if layout.head_size % _SLICE or params.context_block % _SLICE:
        return f"heads of {layout.head_size} or blocks of {params.context_block} are no multiple of {_SLICE}"
    return None


def _scores(q_NKRh: jax.Array, k_NKth: jax.Array) -> jax.Array:
    starts = range(0, q_NKRh.shape[-1], _SLICE)
    q, k = q_NKRh[:, :, :, None], k_NKth[:, :, None]
    lanes = _total([q[..., i : i + _SLICE] * k[..., i : i + _SLICE] for i in starts])
    lanes = jax.lax.optimization_barrier(lanes)
    return _total([lanes[..., i] for i in range(_SLICE)])


def _mix(weight_NKRt: jax.Array, v_NKth: jax.Array) -> jax.Array:
    starts = range(0, weight_NKRt.shape[-1], _SLICE)
    weights, values = weight_NKRt[..., None], v_NKth[:, :, None]
    sums = _total([weights[..., i : i + _SLICE, :] * values[..., i : i + _SLICE, :] for i in starts])
    sums = jax.lax.optimization_barrier(sums)
    return _total([sums[..., i, :] for i in range(_SLICE)])


def _total(parts: Sequence[jax.Array]) -> jax.Array:
    """Their sum, in pairs."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return _total(parts[:half]) + _total(parts[half:])


attend_row = functools.partial(attend_reference, sums=Sums(_scores, _mix))
"""See `ragged_paged_attention`."""
