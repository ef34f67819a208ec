"""The ragged batch as the layers need it."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig


@flax.struct.dataclass
class Rows:
    """The ragged batch as the layers need it, derived once a step."""

    position_T: jax.Array
    """int32 position of each row in its sequence."""
    valid_T: jax.Array
    """bool, False for padding."""
    page_TG: tuple[jax.Array, ...]
    """For each cache group, int32 `[T]`: the page of the row's token (0, the sink, if padding)."""
    page_table: tuple[jax.Array, ...]
    """For each cache group, int32 `[S, P]`."""
    query_start_S1: jax.Array
    """int32 `[S + 1]` first row of each sequence."""
    context_len_S: jax.Array
    """int32 tokens of each sequence once this step is done; 0 if padding."""


def part_of_rows(rows: Rows, part: jax.Array, num_parts: int, *, single: bool) -> Rows:
    """One of so many equal runs of a batch's rows, as a batch of its own.

    To it the rows before are computed, and those after are not there yet.

    Args:
        rows: the batch; the parts divide its rows.
        part: int32 scalar; out of range it is padding alone.
        num_parts: of the batch.
        single: every sequence has exactly one row.
    """
    size = rows.valid_T.shape[0] // num_parts
    is_there = (part >= 0) & (part < num_parts)
    first = jnp.clip(part, 0, num_parts - 1) * size

    def own(array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, first, size)

    page_table, query_start_S1, context_len_S = rows.page_table, rows.query_start_S1, rows.context_len_S
    if single:
        page_table, context_len_S = jax.tree.map(own, (page_table, context_len_S))
        query_start_S1 = jax.lax.dynamic_slice_in_dim(query_start_S1, first, size + 1)
    start_S1 = jnp.where(is_there, jnp.clip(query_start_S1 - first, 0, size), 0)
    after_S = jnp.maximum(query_start_S1[1:] - first - size, 0)
    valid_T = own(rows.valid_T) & is_there
    return Rows(
        position_T=own(rows.position_T),
        valid_T=valid_T,
        page_TG=tuple(jnp.where(valid_T, own(page_T), 0) for page_T in rows.page_TG),
        page_table=page_table,
        query_start_S1=start_S1,
        context_len_S=jnp.where(jnp.diff(start_S1) > 0, context_len_S - after_S, 0),
    )


def sequence_rows(config: EngineConfig, num_rows: int, start: jax.Array, num_tokens: jax.Array) -> Rows:
    """A batch of one sequence's next tokens alone, where nothing else has pages.

    Its pages are 1, 2 and so on in every group.

    Args:
        config: of an engine of one slot.
        num_rows: of the batch; those from `num_tokens` on are padding.
        start: tokens of the sequence before these.
        num_tokens: these.
    """
    row_T = jnp.arange(num_rows, dtype=jnp.int32)
    valid_T = row_T < num_tokens
    position_T = jnp.where(valid_T, start + row_T, 0)
    pages = np.arange(1, config.pages_per_sequence + 1, dtype=np.int32)
    pages[pages >= config.cache.num_pages[0]] = 0  # The table is as wide as whole blocks of context.
    table_1P = jnp.asarray(pages)[None]
    page_T = jnp.where(valid_T, table_1P[0, position_T // config.cache.page_size], 0)
    num_groups = len(config.model.windows)
    return Rows(
        position_T=position_T,
        valid_T=valid_T,
        page_TG=(page_T,) * num_groups,
        page_table=(table_1P,) * num_groups,
        query_start_S1=jnp.stack([jnp.zeros((), jnp.int32), num_tokens]),
        context_len_S=(start + num_tokens)[None],
    )
