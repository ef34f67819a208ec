"""The step: forward, sampling and the write of the new tokens, as one pure program per shape.

The plan travels as one int32 vector and the result comes back as one int32 array: a transfer each way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.chain_drafts import make_drafts
from jaxserve.engine.ragged import ragged_rows
from jaxserve.engine.sampling import Sampled, sample, sampling_rows, unreported
from jaxserve.engine.state import DeviceState
from jaxserve.engine.verify import Drafts, enter_drafts, is_accepted
from jaxserve.model.transformer import Params, Transformer
from jaxserve.plan import StepPlan, StepResult, StepShape


@flax.struct.dataclass
class Batch:
    """A plan on the device. S sequences, R logit rows, G cache groups, X grants of pages in a group."""

    slot_S: jax.Array
    """int32, num_slots (the padding's own row of the state) where unused."""
    num_tokens_S: jax.Array
    """int32, 0 where unused."""
    logit_row_R: jax.Array
    """int32 token rows, T where unused."""
    grants_GX3: jax.Array
    """int32 (slot, index, page); the padding's slot where unused."""
    draft_R: jax.Array
    """int32 the token of each logit row that is a draft, -1 for others; empty in shapes without drafts."""
    unread_S: jax.Array
    """int32 as in `StepPlan.unread`; empty where no draft model drafts."""


@dataclass(frozen=True)
class PlanFormat:
    """How a plan of one shape is laid out in its vector."""

    shape: StepShape
    num_groups: int
    num_slots: int
    page_size: int
    max_iterations: int = 1
    max_drafts: int = 0
    """Most drafts of a sequence; 0 for a shape that has none."""
    has_draft_model: bool = False

    @classmethod
    def of(cls, config: EngineConfig, shape: StepShape, max_iterations: int = 1) -> PlanFormat:
        """The format of a step that is compiled for this config."""
        return cls(
            shape,
            len(config.model.windows),
            config.num_slots,
            config.cache.page_size,
            max_iterations,
            0 if shape.decode else config.max_drafts,
            config.draft is not None and not shape.decode,
        )

    @property
    def num_grants(self) -> int:
        """Pages that a step can need in one group: whole ones of its rows, and a begun one a sequence."""
        return self.shape.rows * self.max_iterations // self.page_size + self.shape.sequences

    @property
    def _sizes(self) -> tuple[int, ...]:
        shape = self.shape
        num_grants = self.num_groups * self.num_grants * 3
        num_drafts = shape.logit_rows if self.max_drafts else 0
        num_unread = shape.sequences if self.has_draft_model else 0
        return shape.sequences, shape.sequences, shape.logit_rows, num_grants, num_drafts, num_unread

    def pack(self, plan: StepPlan) -> np.ndarray:
        """The plan as one vector; its iterations travel beside it. Raises ValueError if it does not fit."""
        vector = _padding(self).copy()
        slots, counts, logit_rows, grants, drafts, unread = self._split(vector)
        num_sequences, num_rows, row_ends = len(plan.slots), plan.num_rows, np.cumsum(plan.num_tokens)
        num_logit_rows = int(plan.num_logit_rows.sum())
        if num_rows > self.shape.rows or num_logit_rows > self.shape.logit_rows:
            raise ValueError(f"a plan of {num_rows} rows and {num_logit_rows} logit rows for {self.shape}")
        slots[:num_sequences], counts[:num_sequences] = plan.slots, plan.num_tokens
        if num_logit_rows == num_sequences:
            logit_rows[:num_sequences] = row_ends - 1
        else:  # Row i of a sequence's last `n` logit rows is the row end - n + i.
            firsts = np.cumsum(plan.num_logit_rows) - plan.num_logit_rows
            shifts = row_ends - plan.num_logit_rows - firsts
            logit_rows[:num_logit_rows] = np.arange(num_logit_rows) + np.repeat(shifts, plan.num_logit_rows)
        for group in range(self.num_groups if len(plan.grants) else 0):
            granted = plan.grants[plan.grants[:, 0] == group, 1:]
            if len(granted) > self.num_grants:
                raise ValueError(
                    f"{len(granted)} page grants in one group, over {self.num_grants}: {self.shape}"
                )
            grants[group, : len(granted)] = granted
        if plan.drafts is not None:
            if len(plan.drafts) > len(drafts):
                raise ValueError(f"a plan with drafts for {self.shape}, which was compiled without")
            drafts[: len(plan.drafts)] = plan.drafts
        if plan.unread is not None:
            unread[:num_sequences] = plan.unread
        return vector

    def unpack(self, vector: jax.Array) -> Batch:
        """The vector as a batch, inside the step."""
        return Batch(*self._split(vector))

    def _split(self, vector: Any) -> tuple[Any, ...]:
        """The parts of a vector; of the host's, what is written to them is written to it."""
        ends = itertools.accumulate(self._sizes)
        slots, counts, logit_rows, grants, drafts, unread = (
            vector[end - size : end] for end, size in zip(ends, self._sizes, strict=True)
        )
        return slots, counts, logit_rows, grants.reshape(self.num_groups, self.num_grants, 3), drafts, unread


@functools.cache
def _padding(form: PlanFormat) -> np.ndarray:
    """The vector of a plan without sequences."""
    sizes = form._sizes
    vector = np.zeros(sum(sizes), np.int32)
    slots, _, logit_rows, grants, drafts, unread = form._split(vector)
    slots[:] = grants[:, :, 0] = form.num_slots
    logit_rows[:] = form.shape.rows
    drafts[:] = unread[:] = -1
    return vector


def run_step(
    transformer: Transformer, form: PlanFormat, params: Params, state: DeviceState, vector: jax.Array
) -> tuple[DeviceState, jax.Array]:
    """One engine step. The first two arguments are static; the state is donated.

    Returns the next state, and int32 `[R, 3 + 2 A]` to be read by `unpack_result`.
    """
    batch = form.unpack(vector)
    state, sampled = advance(transformer, form, params, grant_pages(state, batch), batch)
    return state, pack_result(sampled)


def advance(
    transformer: Transformer,
    form: PlanFormat,
    params: Params,
    state: DeviceState,
    batch: Batch,
    active_S: jax.Array | None = None,
) -> tuple[DeviceState, Sampled]:
    """Compute a batch whose pages are granted: forward, sample, append.

    `active_S` leaves sequences out, in a decode shape: their rows are padding.
    """
    row_sequence_T, rows = ragged_rows(
        tuple(table[batch.slot_S] for table in state.page_table),
        state.num_computed[batch.slot_S],
        batch.num_tokens_S,
        num_rows=form.shape.rows,
        page_size=form.page_size,
        single=form.shape.decode,
        active_S=active_S,
    )
    # Padding takes row 0 of the logits' input but the padding's own slot, so that it writes to no one.
    real_R = batch.logit_row_R < form.shape.rows
    row_R = jnp.where(real_R, batch.logit_row_R, 0)
    if active_S is not None:
        real_R &= rows.valid_T[row_R]
    slot_R = jnp.where(real_R, batch.slot_S[row_sequence_T[row_R]], form.num_slots)
    next_position_R = jnp.where(real_R, rows.position_T[row_R] + 1, 0)
    drafts, drafts_RK, ahead_R = None, None, 0
    if form.max_drafts:
        drafts = Drafts(batch.draft_R, jnp.maximum(next_position_R - state.num_known[slot_R], 0))
        if transformer.config.draft_layers or form.has_draft_model:
            unread_S = batch.unread_S if form.has_draft_model else None
            state, drafts = make_drafts(
                transformer, params, state, drafts, batch.slot_S, row_sequence_T[row_R], unread_S
            )
        drafts_RK = drafts.before(form.max_drafts, unused=state.counts.shape[1])
        ahead_R = jnp.minimum(drafts.ahead, form.max_drafts)  # Rows of prompts may be further.
        state = enter_drafts(state, drafts, slot_R, next_position_R - 1, form.num_slots)
    token_T = state.tokens[batch.slot_S[row_sequence_T], rows.position_T]
    single = form.shape.decode
    hidden_RD, cache = transformer.forward(params, state.cache, token_T, rows, single=single, keep_R=row_R)

    samples_R = real_R & (next_position_R >= state.num_known[slot_R])
    next_known_R = jnp.where(samples_R, -1, state.tokens[slot_R, next_position_R])
    settings = sampling_rows(state, slot_R, next_position_R, drafts_RK, ahead_R)
    max_logprobs = transformer.config.max_logprobs

    def from_logits() -> Sampled:
        return sample(
            transformer.logits(params, hidden_RD),
            settings,
            state,
            next_known_R,
            max_logprobs=max_logprobs,
            logprobs_mode=transformer.config.logprobs_mode,
            mesh=transformer.mesh,
        )

    if form.shape.decode:
        sampled = from_logits()
    else:  # In the middle of prompts nobody asks for logits, and the head is a large part of a small model.
        asked = jnp.any(samples_R | (real_R & settings.wants_logprobs))
        sampled = jax.lax.cond(asked, from_logits, lambda: unreported(next_known_R, max_logprobs))
    num_tokens_S = batch.num_tokens_S if active_S is None else batch.num_tokens_S * active_S
    num_computed = state.num_computed.at[batch.slot_S].add(num_tokens_S)
    accepted_R = samples_R
    if drafts is not None:
        accepted_R &= is_accepted(drafts, sampled.token)
        rejected_R = samples_R & ~accepted_R
        num_computed = num_computed.at[slot_R].add(-rejected_R.astype(jnp.int32))
        sampled = dataclasses.replace(sampled, token=jnp.where(rejected_R, -1, sampled.token))
    state = append_tokens(state, slot_R, next_position_R, accepted_R, sampled.token, form.num_slots)
    return dataclasses.replace(state, cache=cache, num_computed=num_computed), sampled


def unpack_result(packed: np.ndarray) -> StepResult:
    """The host's view of a packed result, padding having been dropped."""
    num_alternatives = (packed.shape[1] - 3) // 2
    return StepResult(
        tokens=packed[:, 0],
        logprobs=packed[:, 1].view(np.float32),
        ranks=packed[:, 2],
        top_tokens=packed[:, 3 : 3 + num_alternatives],
        top_logprobs=packed[:, 3 + num_alternatives :].view(np.float32),
    )


def grant_pages(state: DeviceState, batch: Batch) -> DeviceState:
    """Enter the step's new pages in the page tables."""
    slot_GX, index_GX, page_GX = (batch.grants_GX3[..., i] for i in range(3))
    group_G1 = jnp.arange(slot_GX.shape[0], dtype=jnp.int32)[:, None]
    page_table = state.page_table.at[group_G1, slot_GX, index_GX].set(page_GX, mode="promise_in_bounds")
    return dataclasses.replace(state, page_table=page_table)


def append_tokens(
    state: DeviceState,
    slot_R: jax.Array,
    position_R: jax.Array,
    is_new_R: jax.Array,
    token_R: jax.Array,
    padding_slot: int,
) -> DeviceState:
    """Add newly sampled tokens to their slots' known text and counts."""
    slot_R = jnp.where(is_new_R, slot_R, padding_slot)
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[slot_R, jnp.where(is_new_R, position_R, 0)].set(token_R),
        num_known=state.num_known.at[slot_R].add(is_new_R.astype(jnp.int32)),
        counts=state.counts.at[slot_R, token_R].add(is_new_R.astype(jnp.int32)),
    )


def pack_result(sampled: Sampled) -> jax.Array:
    """One int32 array `[R, 3 + 2 A]`; floats by their bits."""

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    head = jnp.stack([sampled.token, bits(sampled.logprob), sampled.rank], axis=-1)
    return jnp.concatenate([head, sampled.top_tokens, bits(sampled.top_logprobs)], axis=-1)
