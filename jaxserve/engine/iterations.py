"""Several decode iterations in one dispatch, for when no one waits: one plan and one transfer for k tokens.

Measured on CPU (jax 0.10, two busy cores): the loop copies no pool (5.7 MB of temporaries for SmolLM2 either
way); a token of a 260K-parameter model takes 0.83 ms in place of 1.01, one of SmolLM2, where the model is all
that counts, as long as before.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.engine.state import END_IDS, Column, DeviceState
from jaxserve.engine.step import Batch, PlanFormat, advance, grant_pages, pack_result
from jaxserve.model.spread import shares_experts
from jaxserve.model.transformer import Params, Transformer
from sharding import most_of_replicas

Carry = tuple[jax.Array, DeviceState, jax.Array, jax.Array, jax.Array]


def run_iterations(
    transformer: Transformer,
    form: PlanFormat,
    params: Params,
    state: DeviceState,
    vector: jax.Array,
    num_iterations: jax.Array,
) -> tuple[DeviceState, jax.Array]:
    """Up to `num_iterations` decode steps, each sequence until its end; stops when all have met theirs.

    The first two arguments are static; the state is donated. Returns the next state, and int32
    `[form.max_iterations, R, 3 + 2 A]`, each iteration to be read as of `run_step`, with token -1 where a
    sequence took no part.
    """
    batch = form.unpack(vector)

    def iterate(carry: Carry) -> Carry:
        iteration, state, active_S, _, results = carry
        state, sampled = advance(transformer, form, params, state, batch, active_S)
        token_S = jnp.where(active_S, sampled.token, -1)
        results = results.at[iteration].set(pack_result(dataclasses.replace(sampled, token=token_S)))
        active_S &= ~_ended(state, batch, token_S)
        return iteration + 1, state, active_S, goes_on(active_S), results

    def goes_on(active_S: jax.Array) -> jax.Array:
        if not shares_experts(transformer.config):
            return jnp.any(active_S)
        # Other replicas need this one's experts, whatever its own sequences do.
        return most_of_replicas(jnp.any(active_S).astype(jnp.int32)) > 0

    width = 3 + 2 * transformer.config.max_logprobs
    nothing = jnp.full((form.max_iterations, form.shape.logit_rows, width), -1, jnp.int32)
    active_S = batch.num_tokens_S > 0
    start = (jnp.zeros((), jnp.int32), grant_pages(state, batch), active_S, goes_on(active_S), nothing)
    carry = jax.lax.while_loop(lambda carry: (carry[0] < num_iterations) & carry[3], iterate, start)
    return carry[1], carry[-1]


def _ended(state: DeviceState, batch: Batch, token_S: jax.Array) -> jax.Array:
    """Whether each sequence's newest token ends its answer, or it is at its longest."""
    sampling = state.sampling
    at_end_S = jnp.any(sampling.ids(batch.slot_S, END_IDS) == token_S[:, None], axis=-1)
    return at_end_S | (state.num_known[batch.slot_S] >= sampling.number(batch.slot_S, Column.MAX_KNOWN))
