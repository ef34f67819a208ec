"""A decode step as one tick of the pipeline: each stage takes another group of sequences through its layers.

A group enters in one step, with the token that each of its sequences knows last, is handed from stage to
stage in the steps that follow, and leaves the last stage in the one that is as many later as there are other
stages: then its tokens are sampled, and it may enter again. So every stage works in every step, on rows of
its own, and reads its weights once for each group.

What belongs to the group stays in the state meanwhile: nobody may fill its slots, and a step of another kind
has to wait until no group is under way.

Axes: N stages, S sequences of a group.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.engine.ragged import ragged_rows
from jaxserve.engine.sampling import Sampled, sample, sampling_rows
from jaxserve.engine.state import DeviceState, TicksInFlight
from jaxserve.engine.step import PlanFormat, append_tokens, grant_pages, pack_result
from jaxserve.model.rows import Rows
from jaxserve.model.transformer import Params, Transformer


def run_tick(
    transformer: Transformer, form: PlanFormat, params: Params, state: DeviceState, vector: jax.Array
) -> tuple[DeviceState, jax.Array]:
    """One tick, which the plan's sequences enter. The first two arguments are static; the state is donated.

    Of the groups under way none may have more sequences than the form, or one that enters.

    Returns the next state, and as of `run_step` the result of the group that leaves, a row for each of its
    sequences.
    """
    batch = form.unpack(vector)
    state = grant_pages(state, batch)
    assert state.ticks is not None, "there are groups"
    num_rows = form.shape.rows
    slot_NS = jnp.concatenate([batch.slot_S[None], state.ticks.slot_NS[:-1, :num_rows]])
    rows = _rows_of_groups(form, state, slot_NS.reshape(-1))
    token_S = state.tokens[batch.slot_S, rows.position_T[:num_rows]]
    handed_NSD = state.ticks.handed_NSD
    left_SD, handed, cache = transformer.tick(params, state.cache, token_S, handed_NSD[:, :num_rows], rows)
    ticks = TicksInFlight(
        slot_NS=jnp.full_like(state.ticks.slot_NS, form.num_slots).at[:, :num_rows].set(slot_NS),
        handed_NSD=handed_NSD.at[:, :num_rows].set(handed),
    )
    state = dataclasses.replace(state, cache=cache, ticks=ticks)
    state, sampled = _sample_after(transformer, form, params, state, slot_NS[-1], left_SD)
    return state, pack_result(sampled)


def _rows_of_groups(form: PlanFormat, state: DeviceState, slot_T: jax.Array) -> Rows:
    """A row for each slot; that of the padding is padding."""
    _, rows = ragged_rows(
        tuple(table[slot_T] for table in state.page_table),
        state.num_computed[slot_T],
        jnp.ones_like(slot_T),
        num_rows=slot_T.shape[0],
        page_size=form.page_size,
        single=True,
        active_S=slot_T < form.num_slots,
    )
    return rows


def _sample_after(
    transformer: Transformer,
    form: PlanFormat,
    params: Params,
    state: DeviceState,
    slot_S: jax.Array,
    hidden_SD: jax.Array,
) -> tuple[DeviceState, Sampled]:
    """Sample after the last stage's hidden states of some slots, and move these on by the row."""
    config, is_real_S = transformer.config, slot_S < form.num_slots
    position_S = jnp.where(is_real_S, state.num_computed[slot_S] + 1, 0)
    samples_S = is_real_S & (position_S >= state.num_known[slot_S])
    sampled = sample(
        transformer.logits(params, hidden_SD),
        sampling_rows(state, slot_S, position_S),
        state,
        jnp.where(samples_S, -1, state.tokens[slot_S, position_S]),
        max_logprobs=config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
        mesh=transformer.mesh,
    )
    num_computed = state.num_computed.at[slot_S].add(is_real_S.astype(jnp.int32))
    state = append_tokens(state, slot_S, position_S, samples_S, sampled.token, form.num_slots)
    return dataclasses.replace(state, num_computed=num_computed), sampled
