"""Drafts that the engine makes itself, one after another: by the model's first layers, or by a second model.

The first layers are an early exit, as in LayerSkip (Elhoushi et al. 2024). Keys and values of a layer depend
on the layers below it alone, so a draft's in these layers are the model's own: they go where its verification
writes them again, and no second cache is needed.

A second model (Leviathan et al. 2023) has its own pools on the page ids of the model's full attention, so
that one page table serves both. What it has read of a text only decides how good its drafts are: no step
waits for it to read along, it reads what it has missed when a sequence is to draft (`read_known`), and what
it read of wrong drafts is written over. So nothing is rolled back, and a step without drafts does not know
of it.

A draft is sampled as its row's token will be, with the same noise: they agree wherever the distributions are
near. A head that drafts from the model's own hidden states (EAGLE-3, multi-token prediction) would be one
more `forward` here, with the last row's hidden state in the carry.

Axes: S sequences, R logit rows, K drafts of a sequence at most, V vocabulary, T rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.config import ModelConfig
from jaxserve.engine.ragged import ragged_rows
from jaxserve.engine.sampling import choose, sampling_rows
from jaxserve.engine.state import DeviceState
from jaxserve.engine.verify import Drafts
from jaxserve.model.cache import Cache, draft_layouts
from jaxserve.model.rows import Rows
from jaxserve.model.spread import shares_experts
from jaxserve.model.transformer import Params, Transformer
from jaxserve.plan import ENGINE_DRAFT
from jaxserve.speculation import read_speculative
from sharding import PIPE, MeshAxes, mesh_name, most_of_replicas

Carry = tuple[jax.Array, Cache, jax.Array, jax.Array]
DRAFT_PARAMETERS = "draft"
"""Where the parameters of a draft model lie in those of the model."""


@dataclass(frozen=True)
class _Source:
    """What makes the drafts of a transformer: part of itself, or a model beside it."""

    transformer: Transformer
    num_layers: int | None
    """Of the transformer; None for all."""
    group: int | None
    """The cache group whose page ids all its pools are on; None where it has the model's own pools."""

    def params(self, params: Params) -> Params:
        return params if self.group is None else params[DRAFT_PARAMETERS]

    def cache(self, state: DeviceState) -> Cache:
        return state.cache if self.group is None else state.draft_cache

    def page_table(self, state: DeviceState, slot_S: jax.Array) -> tuple[jax.Array, ...]:
        """For each of its cache groups int32 `[S, P]`."""
        if self.group is None:
            return tuple(table[slot_S] for table in state.page_table)
        return (state.page_table[self.group, slot_S],) * len(self.transformer.layouts)

    def with_cache(self, state: DeviceState, cache: Cache) -> DeviceState:
        field = "cache" if self.group is None else "draft_cache"
        return dataclasses.replace(state, **{field: cache})


def _source_of(transformer: Transformer) -> _Source:
    config = transformer.config
    if config.draft is None:
        return _Source(transformer, config.draft_layers, None)
    layouts = draft_layouts(config, transformer.layouts)
    return _Source(
        dataclasses.replace(transformer, config=config.draft, layouts=layouts), None, config.full_group
    )


def make_drafts(
    transformer: Transformer,
    params: Params,
    state: DeviceState,
    drafts: Drafts,
    slot_S: jax.Array,
    sequence_R: jax.Array,
    unread_S: jax.Array | None,
) -> tuple[DeviceState, Drafts]:
    """Guess the drafts that are asked for, one after another.

    Args:
        transformer: its config says what drafts, and how far.
        params: the model's.
        state: pages are granted for the drafts.
        drafts: with ENGINE_DRAFT in place of each.
        slot_S: int32 each sequence's slot.
        sequence_R: int32 each logit row's sequence.
        unread_S: int32 as in `StepPlan.unread`, of a draft model; None where none drafts.

    Returns the state with the drafts' keys and values, and the drafts.
    """
    source, config = _source_of(transformer), transformer.config
    num_sequences, vocab = slot_S.shape[0], config.model.vocab_size
    asked_R = drafts.token == ENGINE_DRAFT
    num_S = jnp.zeros((num_sequences,), jnp.int32).at[sequence_R].add(asked_R.astype(jnp.int32))
    if unread_S is None:
        unread_S, num_rounds_S = jnp.zeros_like(num_S), num_S
    else:  # It also reads the last known token of those that have no drafts.
        num_rounds_S = jnp.where(unread_S < 0, 0, unread_S + jnp.maximum(num_S, 1))
        unread_S = jnp.maximum(unread_S, 0)
    first_S = state.num_computed[slot_S] - unread_S
    every_S = jnp.arange(num_sequences, dtype=jnp.int32)
    page_table = source.page_table(state, slot_S)

    def guess(carry: Carry) -> Carry:
        number, cache, guessed_S, token_SK = carry
        rows = _rows(page_table, first_S + number, number < num_rounds_S, config.cache.page_size)
        token_S = jnp.where(number <= unread_S, state.tokens[slot_S, rows.position_T], guessed_S)
        hidden_SD, cache = source.transformer.forward(
            source.params(params),
            cache,
            token_S,
            rows,
            single=not source.transformer.config.deterministic,
            num_layers=source.num_layers,
        )
        sampling = sampling_rows(state, slot_S, rows.position_T + 1, token_SK)
        logits_SV = _of_size(source.transformer.logits(source.params(params), hidden_SD), vocab)
        guessed_S = choose(logits_SV, sampling, state, transformer.mesh)
        place_S = jnp.where(number < unread_S, config.max_drafts, number - unread_S)
        return number + 1, cache, guessed_S, token_SK.at[every_S, place_S].set(guessed_S, mode="drop")

    nothing_SK = jnp.full((num_sequences, config.max_drafts), vocab, jnp.int32)
    start = (jnp.zeros((), jnp.int32), source.cache(state), jnp.zeros_like(num_S), nothing_SK)
    # What is only read is read where somebody drafts: a step without drafts has none of this to wait for.
    num_rounds = jnp.where(jnp.any(asked_R), jnp.max(num_rounds_S), 0)
    if shares_experts(source.transformer.config):  # With other replicas, which may draft further.
        num_rounds = most_of_replicas(num_rounds)
    _, cache, _, token_SK = jax.lax.while_loop(lambda carry: carry[0] < num_rounds, guess, start)
    place_R = jnp.clip(drafts.ahead - 1, 0, config.max_drafts - 1)
    token_R = jnp.where(asked_R, token_SK[sequence_R, place_R], drafts.token)
    return source.with_cache(state, cache), dataclasses.replace(drafts, token=token_R)


def read_known(
    transformer: Transformer, num_rows: int, params: Params, state: DeviceState, reads_S3: jax.Array
) -> DeviceState:
    """Have the draft model read tokens that the model has computed.

    Args:
        transformer: the model's; its config has a draft model. Static, as is the next one.
        num_rows: the most tokens.
        params: the draft model's.
        state: donated.
        reads_S3: int32 as in `StepPlan.reads`, with the padding's slot and no tokens where unused.
    """
    source = _source_of(transformer)
    slot_S, first_S, num_tokens_S = (reads_S3[:, column] for column in range(3))
    sequence_T, rows = ragged_rows(
        source.page_table(state, slot_S),
        first_S,
        num_tokens_S,
        num_rows=num_rows,
        page_size=transformer.config.cache.page_size,
    )
    token_T = state.tokens[slot_S[sequence_T], rows.position_T]
    _, cache = source.transformer.forward(params, state.draft_cache, token_T, rows, single=False)
    return source.with_cache(state, cache)


def _rows(
    page_table: tuple[jax.Array, ...], position_S: jax.Array, valid_S: jax.Array, page_size: int
) -> Rows:
    """A row for each sequence that still drafts."""
    num_sequences = position_S.shape[0]
    position_S = jnp.where(valid_S, position_S, 0)
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


def _of_size(logits_SV: jax.Array, vocab: int) -> jax.Array:
    """Logits of a model whose table has more or fewer rows for the same tokenizer."""
    missing = vocab - logits_SV.shape[-1]
    if missing > 0:
        return jnp.pad(logits_SV, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return logits_SV[:, :vocab]


def resolve_draft_layers(speculative: str | None, model: ModelConfig, mesh: MeshAxes) -> int:
    """Layers that draft in the engine. Raises ValueError for more than all but the last, and where stages
    share them out."""
    num_layers = read_speculative(speculative).num_layers if speculative else 0
    if num_layers >= model.num_layers:
        raise ValueError(
            f"speculative {speculative!r}: the model has {model.num_layers} layers, of which 1 to "
            f"{model.num_layers - 1} can draft"
        )
    if num_layers and PIPE in dict(mesh):
        raise ValueError(
            f"speculative {speculative!r} on mesh {mesh_name(mesh)}: the first layers draft "
            f"where all layers are, so without {PIPE!r}"
        )
    return num_layers
