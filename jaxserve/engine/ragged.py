"""The rows of a ragged batch: consecutive tokens of some slots, one slot's after the other's.

Axes: T token rows, S sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.model.rows import Rows


def ragged_rows(
    page_table: tuple[jax.Array, ...],
    start_S: jax.Array,
    num_tokens_S: jax.Array,
    *,
    num_rows: int,
    page_size: int,
    single: bool = False,
    active_S: jax.Array | None = None,
) -> tuple[jax.Array, Rows]:
    """Which sequence each row belongs to, int32 `[T]`, and the rows as the layers need them.

    Args:
        page_table: for each cache group the sequences' pages, int32 `[S, P]`.
        start_S: int32 position of each one's first row.
        num_tokens_S: int32 rows of each, 0 where unused.
        num_rows: T.
        page_size: tokens of a page.
        single: every sequence has exactly one row.
        active_S: leaves sequences out: their rows are padding.
    """
    row_T = jnp.arange(num_rows, dtype=jnp.int32)
    end_S = jnp.cumsum(num_tokens_S)
    first_S = end_S - num_tokens_S
    valid_T = row_T < end_S[-1]
    sequence_T = row_T if single else jnp.sum(row_T[:, None] >= end_S[None], -1, dtype=jnp.int32)
    sequence_T = jnp.minimum(sequence_T, num_tokens_S.shape[0] - 1)
    real_S = num_tokens_S > 0
    if active_S is not None:
        valid_T, real_S = valid_T & active_S[sequence_T], real_S & active_S
    position_T = jnp.where(valid_T, start_S[sequence_T] + row_T - first_S[sequence_T], 0)
    page_TG = tuple(jnp.where(valid_T, table[sequence_T, position_T // page_size], 0) for table in page_table)
    return sequence_T, Rows(
        position_T=position_T,
        valid_T=valid_T,
        page_TG=page_TG,
        page_table=page_table,
        query_start_S1=jnp.concatenate([jnp.zeros((1,), jnp.int32), end_S]),
        context_len_S=jnp.where(real_S, start_S + num_tokens_S, 0),
    )
