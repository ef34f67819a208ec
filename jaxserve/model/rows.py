"""The ragged batch as the layers need it."""

from __future__ import annotations

import flax.struct
import jax


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
