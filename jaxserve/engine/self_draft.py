"""Drafts by the model's own first layers: an early exit, as in LayerSkip (Elhoushi et al. 2024).

Keys and values of a layer depend on the layers below it alone, so a draft's in these layers are the model's
own: they go where its verification writes them again, and no second cache is needed. A draft is sampled as
its row's token will be, with the same noise: they agree wherever the distributions are near.

Axes: S sequences, R logit rows, K drafts of a sequence at most, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.engine.sampling import choose, sampling_rows
from jaxserve.engine.state import DeviceState
from jaxserve.engine.verify import Drafts
from jaxserve.model.cache import Cache
from jaxserve.model.rows import Rows
from jaxserve.model.transformer import Params, Transformer
from jaxserve.plan import ENGINE_DRAFT

Carry = tuple[jax.Array, Cache, jax.Array, jax.Array]


def make_drafts(
    transformer: Transformer,
    params: Params,
    state: DeviceState,
    drafts: Drafts,
    slot_S: jax.Array,
    sequence_R: jax.Array,
) -> tuple[DeviceState, Drafts]:
    """Guess the drafts that are asked for, one after another.

    Args:
        transformer: its config says how many layers draft, and how far.
        params: the model's.
        state: pages are granted for the drafts.
        drafts: with ENGINE_DRAFT in place of each.
        slot_S: int32 each sequence's slot.
        sequence_R: int32 each logit row's sequence.

    Returns the state with the drafts' keys and values in its first layers, and the drafts.
    """
    config = transformer.config
    num_sequences, vocab = slot_S.shape[0], config.model.vocab_size
    asked_R = drafts.token == ENGINE_DRAFT
    num_S = jnp.zeros((num_sequences,), jnp.int32).at[sequence_R].add(asked_R.astype(jnp.int32))
    first_S = state.num_computed[slot_S]

    def guess(carry: Carry) -> Carry:
        number, cache, token_S, token_SK = carry
        rows = _rows(state, slot_S, first_S + number, number < num_S, config.cache.page_size)
        hidden_SD, cache = transformer.forward(
            params, cache, token_S, rows, single=not config.deterministic, num_layers=config.draft_layers
        )
        sampling = sampling_rows(state, slot_S, rows.position_T + 1, token_SK)
        token_S, _ = choose(transformer.logits(params, hidden_SD), sampling, state, transformer.mesh)
        return number + 1, cache, token_S, token_SK.at[:, number].set(token_S)

    nothing_SK = jnp.full((num_sequences, config.max_drafts), vocab, jnp.int32)
    known_S = state.tokens[slot_S, first_S]
    start = (jnp.zeros((), jnp.int32), state.cache, known_S, nothing_SK)
    _, cache, _, token_SK = jax.lax.while_loop(lambda carry: carry[0] < jnp.max(num_S), guess, start)
    place_R = jnp.clip(drafts.ahead - 1, 0, config.max_drafts - 1)
    token_R = jnp.where(asked_R, token_SK[sequence_R, place_R], drafts.token)
    return dataclasses.replace(state, cache=cache), dataclasses.replace(drafts, token=token_R)


def _rows(
    state: DeviceState, slot_S: jax.Array, position_S: jax.Array, valid_S: jax.Array, page_size: int
) -> Rows:
    """A row for each sequence that still drafts."""
    num_sequences = slot_S.shape[0]
    position_S = jnp.where(valid_S, position_S, 0)
    page_table = tuple(table[slot_S] for table in state.page_table)
    sequence_S = jnp.arange(num_sequences, dtype=jnp.int32)
    return Rows(
        position_T=position_S,
        valid_T=valid_S,
        page_TG=tuple(
            jnp.where(valid_S, table[sequence_S, position_S // page_size], 0) for table in page_table
        ),
        page_table=page_table,
        query_start_S1=jnp.arange(num_sequences + 1, dtype=jnp.int32),
        context_len_S=jnp.where(valid_S, position_S + 1, 0),
    )
