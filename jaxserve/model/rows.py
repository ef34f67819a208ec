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
