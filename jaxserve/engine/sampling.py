"""From logits to tokens: one transform for every row, and noise that is a function of the request alone.

What a row does not use is not computed: every part sits behind a condition on the whole batch. Nothing sorts
the vocabulary: the cuts of top-k and top-p are found by bisection over the ordered bits of the logits.

Axes: R logit rows, V vocabulary, A alternatives reported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import LogprobsMode
from jaxserve.engine.row_blocks import by_row_blocks
from jaxserve.engine.state import BIAS_IDS, FLOAT_FIELDS, PROMPT_FLAG, STOP_IDS, Column, DeviceState
from sharding import constrained, per_shard, shard_index

NEGATIVE = -jnp.inf
_BLOCK = 128
"""Logits whose largest is found at once, and their place only where it is that of the row."""


@flax.struct.dataclass
class SamplingRows:
    """The sampling state of each logit row's slot, and where the row stands."""

    slot: jax.Array
    """[R] int32."""
    position: jax.Array
    """[R] int32 position of the token to be sampled."""
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    """[R] float32 each."""
    top_k: jax.Array
    """[R] int32, 0 for all."""
    key: jax.Array
    """[R, 2] uint32."""
    wants_logprobs: jax.Array
    """[R] bool."""
    drafts: jax.Array | None
    """[R, K] int32 the drafts that come before the token to be sampled, V (out of range) where there are
    fewer; None if there are none in steps of this shape."""
    ahead: jax.Array
    """[R] int32 how many these are."""


@flax.struct.dataclass
class Sampled:
    """What a step reports of each logit row."""

    token: jax.Array
    """[R] int32."""
    logprob: jax.Array
    """[R] float32."""
    rank: jax.Array
    """[R] int32, from 1."""
    top_tokens: jax.Array
    """[R, A] int32."""
    top_logprobs: jax.Array
    """[R, A] float32."""


def sampling_rows(
    state: DeviceState,
    slot_R: jax.Array,
    position_R: jax.Array,
    drafts_RK: jax.Array | None = None,
    ahead_R: jax.Array | int = 0,
) -> SamplingRows:
    """Gather what each row needs from its slot; the others as in `SamplingRows`."""
    sampling = state.sampling
    floats = sampling.floats[:, : len(FLOAT_FIELDS)][slot_R]
    return SamplingRows(
        slot=slot_R,
        position=position_R,
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        repetition_penalty=floats[:, 3],
        presence_penalty=floats[:, 4],
        frequency_penalty=floats[:, 5],
        top_k=sampling.number(slot_R, Column.TOP_K),
        key=sampling.key(slot_R),
        wants_logprobs=sampling.is_set(slot_R, Column.WANTS_LOGPROBS),
        drafts=drafts_RK,
        ahead=jnp.broadcast_to(jnp.asarray(ahead_R, jnp.int32), slot_R.shape),
    )


def sample(
    logits_RV: jax.Array,
    rows: SamplingRows,
    state: DeviceState,
    next_known_R: jax.Array,
    *,
    max_logprobs: int,
    logprobs_mode: LogprobsMode,
    mesh: Mesh | None = None,
) -> Sampled:
    """Choose a token for each row and report on it.

    Args:
        logits_RV: float32 logits of the model.
        next_known_R: int32 the token that already follows the row, -1 where one is to be sampled.
        max_logprobs: alternatives reported for each row (A).
        logprobs_mode: whether they are of the model or of the distribution sampled from.
        mesh: what the vocabulary is cut over, if anything.
    """
    drawn_R = choose(logits_RV, rows, state, mesh)
    token_R = jnp.where(next_known_R >= 0, next_known_R, drawn_R)

    def report(logits_RV: jax.Array, rows: SamplingRows, token_R: jax.Array) -> Sampled:
        raw = logprobs_mode == "raw"
        scored_RV = logits_RV if raw else truncate(_adjusted(logits_RV, rows, state, mesh), rows)
        return _report(scored_RV, token_R, max_logprobs, mesh)

    told = functools.partial(by_row_blocks, report, logits_RV, rows, token_R)
    return jax.lax.cond(jnp.any(rows.wants_logprobs), told, lambda: unreported(token_R, max_logprobs))


def unreported(token_R: jax.Array, max_logprobs: int) -> Sampled:
    """What there is to say of tokens that nobody asked about."""
    zeros = jnp.zeros((token_R.shape[0], max_logprobs), jnp.int32)
    zero = jnp.zeros_like(token_R)
    return Sampled(token_R, zero.astype(jnp.float32), zero, zeros, zeros.astype(jnp.float32))


def choose(logits_RV: jax.Array, rows: SamplingRows, state: DeviceState, mesh: Mesh | None) -> jax.Array:
    """[R] a token for each row; arguments as of `sample`."""

    def by_settings(logits_RV: jax.Array, rows: SamplingRows) -> jax.Array:
        adjusted_RV = _adjusted(logits_RV, rows, state, mesh)
        return jax.lax.cond(
            jnp.any(rows.temperature > 0.0),
            lambda: draw(adjusted_RV, rows, mesh),
            lambda: _argmax(adjusted_RV, mesh),
        )

    # No array of logits leaves a condition where nobody asked for one: it would be copied.
    has_settings = jnp.any(_is_adjusted(rows, state) | (rows.temperature > 0.0))
    chosen = functools.partial(by_row_blocks, by_settings, logits_RV, rows)
    return jax.lax.cond(has_settings, chosen, lambda: _argmax(logits_RV, mesh))


def _adjusted(logits_RV: jax.Array, rows: SamplingRows, state: DeviceState, mesh: Mesh | None) -> jax.Array:
    """The logits [R, V] that rows are chosen by, cut over a mesh as the model's are."""
    # Left to itself, the partitioner gathers them whole around a condition.
    return constrained(adjust_logits(logits_RV, rows, state), (None, "vocab"), mesh)


def _is_adjusted(rows: SamplingRows, state: DeviceState) -> jax.Array:
    """[R] whether `adjust_logits` does anything to a row."""
    sampling = state.sampling
    biased_R = sampling.is_set(rows.slot, Column.NUM_BIASES)
    masked_R = sampling.is_set(rows.slot, Column.MASKED)
    return biased_R | _is_withheld(rows, state) | masked_R | _is_penalised(rows)


def _is_withheld(rows: SamplingRows, state: DeviceState) -> jax.Array:
    """[R] whether the answer is too short to stop."""
    return rows.position < state.sampling.number(rows.slot, Column.MIN_LEN)


def _is_penalised(rows: SamplingRows) -> jax.Array:
    """[R] whether the text so far counts against its tokens."""
    return (rows.repetition_penalty != 1.0) | (rows.presence_penalty != 0.0) | (rows.frequency_penalty != 0.0)


def adjust_logits(logits_RV: jax.Array, rows: SamplingRows, state: DeviceState) -> jax.Array:
    """The part of the transform that greedy rows share: bias, penalties, masks (withheld is -inf)."""
    sampling = state.sampling
    withheld_R = _is_withheld(rows, state)
    masked_R = sampling.is_set(rows.slot, Column.MASKED)
    penalised_R = _is_penalised(rows)
    row_R1 = jnp.arange(logits_RV.shape[0], dtype=jnp.int32)[:, None]

    def adjust() -> jax.Array:
        adjusted_RV = logits_RV.at[row_R1, sampling.ids(rows.slot, BIAS_IDS)].add(
            sampling.bias_values(rows.slot), mode="drop"
        )
        adjusted_RV = jnp.where(penalised_R[:, None], _penalise(adjusted_RV, rows, state), adjusted_RV)
        allowed_RV = _unpack_bits(sampling.allowed(rows.slot, rows.ahead), logits_RV.shape[1])
        adjusted_RV = jnp.where(allowed_RV | ~masked_R[:, None], adjusted_RV, NEGATIVE)
        # Unused entries are -1: negative ids count from the end, so send them out of range.
        stop_ids = sampling.ids(rows.slot, STOP_IDS)
        stop_ids = jnp.where((stop_ids >= 0) & withheld_R[:, None], stop_ids, logits_RV.shape[1])
        goes_on_RV = adjusted_RV.at[row_R1, stop_ids].set(NEGATIVE, mode="drop")
        # Where only the end may follow, it may: a minimum length yields to a grammar that is at its end.
        can_go_on_R = jnp.any(goes_on_RV > NEGATIVE, axis=-1)
        return jnp.where(can_go_on_R[:, None], goes_on_RV, adjusted_RV)

    return jax.lax.cond(jnp.any(_is_adjusted(rows, state)), adjust, lambda: logits_RV)


def draw(adjusted_RV: jax.Array, rows: SamplingRows, mesh: Mesh | None = None) -> jax.Array:
    """[R] tokens by the Gumbel-max trick: argmax of truncated logits plus noise; greedy rows without."""
    truncated_RV = truncate(adjusted_RV, rows)
    noisy_RV = truncated_RV + gumbel_noise(rows.key, rows.position, adjusted_RV.shape[1])
    return _argmax(jnp.where(rows.temperature[:, None] > 0.0, noisy_RV, adjusted_RV), mesh)


def truncate(adjusted_RV: jax.Array, rows: SamplingRows) -> jax.Array:
    """Temperature, then top-k, top-p and min-p: what they cut off is -inf. Greedy rows stay as they are."""
    sampled_R = rows.temperature > 0.0
    scaled_RV = adjusted_RV / jnp.where(sampled_R, rows.temperature, 1.0)[:, None]
    top_k_R = jnp.where(sampled_R, rows.top_k, 0)
    top_p_R = jnp.where(sampled_R, rows.top_p, 1.0)
    min_p_R = jnp.where(sampled_R, rows.min_p, 0.0)
    scaled_RV = jax.lax.cond(
        jnp.any((top_k_R > 0) | (top_p_R < 1.0)), keep_likeliest, lambda x, *_: x, scaled_RV, top_k_R, top_p_R
    )
    floor_R = jnp.max(scaled_RV, axis=-1) + jnp.log(min_p_R)
    return jnp.where(scaled_RV >= floor_R[:, None], scaled_RV, NEGATIVE)


def keep_likeliest(logits_RV: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array) -> jax.Array:
    """Exactly the k largest of each row, and of those the smallest set that holds p of their probability.

    Equal logits go by lowest id. k 0 and p 1 keep all. Both kept sets are beginnings of the row's order, so
    each is told by a cut in the ordered bits and by how many of the tokens at the cut belong to it.
    """
    num_rows, vocab = logits_RV.shape
    key_RV = _ordered_bits(logits_RV)

    def count_from(cut_R: jax.Array) -> jax.Array:
        return jnp.sum(key_RV >= cut_R[:, None], axis=-1, dtype=jnp.int32)

    wanted_R = jnp.where(top_k_R > 0, jnp.minimum(top_k_R, vocab), vocab)
    k_cut_R = _highest_cut(lambda cut_R: count_from(cut_R) >= wanted_R, num_rows)
    k_at_cut_R = wanted_R - count_from(k_cut_R + 1)

    peak_R = jnp.max(logits_RV, axis=-1)
    weight_RV = jnp.exp(logits_RV - peak_R[:, None])

    def mass_from(cut_R: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(key_RV >= cut_R[:, None], weight_RV, 0.0), axis=-1)

    def weight_at(cut_R: jax.Array) -> jax.Array:
        return jnp.exp(_from_ordered_bits(cut_R) - peak_R)

    total_R = mass_from(k_cut_R + 1) + k_at_cut_R.astype(jnp.float32) * weight_at(k_cut_R)
    mass_R = top_p_R * total_R
    p_cut_R = _highest_cut(lambda cut_R: mass_from(cut_R) >= mass_R, num_rows)
    missing_R = (mass_R - mass_from(p_cut_R + 1)) / jnp.maximum(weight_at(p_cut_R), 1e-37)
    p_at_cut_R = jnp.clip(jnp.ceil(missing_R), 1.0, float(vocab)).astype(jnp.int32)

    by_p_R = (top_p_R < 1.0) & (p_cut_R >= k_cut_R)
    at_cut_R = jnp.where(by_p_R, p_at_cut_R, k_at_cut_R)
    at_cut_R = jnp.where(p_cut_R == k_cut_R, jnp.minimum(at_cut_R, k_at_cut_R), at_cut_R)
    return _keep_from(logits_RV, key_RV, jnp.where(by_p_R, p_cut_R, k_cut_R), at_cut_R)


def gumbel_noise(key_R2: jax.Array, position_R: jax.Array, vocab_size: int) -> jax.Array:
    """[R, V] standard Gumbel noise: a counter-based hash of (key, position, token id) and nothing else."""
    position_R = position_R.astype(jnp.uint32)
    high_R = _mix(key_R2[:, 0] ^ _mix(key_R2[:, 1] + position_R * jnp.uint32(0x9E3779B9)))
    low_R = _mix(key_R2[:, 1] ^ _mix(high_R + jnp.uint32(0x85EBCA6B)))
    token_V = jnp.arange(vocab_size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    bits_RV = _mix(_mix(token_V[None] ^ high_R[:, None]) + low_R[:, None])
    # The uniform is finest near zero, where -log1p(-u) gives the large values that decide a sample.
    uniform_RV = (bits_RV.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    uniform_RV = jnp.minimum(uniform_RV, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform_RV))


def _penalise(logits_RV: jax.Array, rows: SamplingRows, state: DeviceState) -> jax.Array:
    """Repetition (Keskar et al. 2019, section 4.1) over the whole text, the others over the answer."""
    counts_RV = state.counts[rows.slot]
    if rows.drafts is not None:
        row_R1 = jnp.arange(counts_RV.shape[0], dtype=jnp.int32)[:, None]
        counts_RV = counts_RV.at[row_R1, rows.drafts].add(1, mode="drop")
    answered_RV = counts_RV & (PROMPT_FLAG - 1)
    factor_RV = jnp.where(counts_RV > 0, rows.repetition_penalty[:, None], 1.0)
    logits_RV = jnp.where(logits_RV > 0.0, logits_RV / factor_RV, logits_RV * factor_RV)
    logits_RV = logits_RV - answered_RV.astype(jnp.float32) * rows.frequency_penalty[:, None]
    return logits_RV - (answered_RV > 0).astype(jnp.float32) * rows.presence_penalty[:, None]


def _report(scored_RV: jax.Array, token_R: jax.Array, max_logprobs: int, mesh: Mesh | None) -> Sampled:
    """Log-probability and rank of the chosen token, and the likeliest alternatives."""
    normaliser_R = jax.nn.logsumexp(scored_RV, axis=-1)
    chosen_R = jnp.take_along_axis(scored_RV, token_R[:, None], axis=-1)[:, 0]
    rank_R = jnp.sum(scored_RV > chosen_R[:, None], axis=-1, dtype=jnp.int32) + 1
    top_RA, token_RA = _likeliest(scored_RV, max_logprobs, mesh)
    return Sampled(
        token=token_R,
        logprob=chosen_R - normaliser_R,
        rank=rank_R,
        top_tokens=token_RA,
        top_logprobs=top_RA - normaliser_R[:, None],
    )


def _likeliest(scored_RV: jax.Array, number: int, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """[R, A] the largest of each row and their ids: on a mesh, of what each device finds in its part."""

    def own(scored_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
        num_own = scored_RV.shape[1]
        top_RA, token_RA = jax.lax.top_k(scored_RV, min(number, num_own))
        return top_RA, token_RA.astype(jnp.int32) + shard_index("vocab", mesh) * num_own

    cut = (None, "vocab")
    top_RA, token_RA = per_shard(own, mesh, in_axes=(cut,), out_axes=(cut, cut))(scored_RV)
    if mesh is None:
        return top_RA, token_RA
    top_RA, place_RA = jax.lax.top_k(top_RA, number)
    return top_RA, jnp.take_along_axis(token_RA, place_RA, axis=-1)


def _argmax(logits_RV: jax.Array, mesh: Mesh | None) -> jax.Array:
    """[R] the largest of each row, the lowest id among equals."""
    block = math.gcd(logits_RV.shape[1], _BLOCK)
    if mesh is not None or block < _BLOCK // 4:
        return _first_largest(logits_RV)
    return jax.lax.platform_dependent(
        logits_RV, cpu=functools.partial(_first_largest_by_blocks, block), default=_first_largest
    )


def _first_largest(x_RV: jax.Array) -> jax.Array:
    # In two passes: XLA on CPU compares one number at a time where value and place are reduced together.
    largest_R1 = jnp.max(x_RV, axis=-1, keepdims=True)
    id_V = jnp.arange(x_RV.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(x_RV >= largest_R1, id_V[None], x_RV.shape[1] - 1), axis=-1)


def _first_largest_by_blocks(block: int, x_RV: jax.Array) -> jax.Array:
    """The same, looking for the place in one block only: a pass over eight rows of 50,000 logits takes a CPU
    half a millisecond."""
    x_RBb = x_RV.reshape(x_RV.shape[0], -1, block)
    block_R = _first_largest(jnp.max(x_RBb, axis=-1))
    x_Rb = jnp.take_along_axis(x_RBb, block_R[:, None, None], axis=1)[:, 0]
    return block_R * block + _first_largest(x_Rb)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of the floats; equal floats have equal keys."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0 turns -0.0 into 0.0
    return jnp.where(bits >> 31 == 0, bits | jnp.uint32(1 << 31), ~bits)


def _from_ordered_bits(key: jax.Array) -> jax.Array:
    """The float of a key."""
    bits = jnp.where(key >> 31 == 1, key ^ jnp.uint32(1 << 31), ~key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _highest_cut(enough: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """[R] the largest uint32 for which `enough` still holds in each row, bit by bit from the top."""

    def try_bit(i: jax.Array, cut_R: jax.Array) -> jax.Array:
        candidate_R = cut_R | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(candidate_R), candidate_R, cut_R)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros((num_rows,), jnp.uint32))


def _keep_from(
    logits_RV: jax.Array, key_RV: jax.Array, cut_R: jax.Array, num_at_cut_R: jax.Array
) -> jax.Array:
    """Keep what lies above the cut and, by lowest id, so many of those at it."""
    at_cut_RV = key_RV == cut_R[:, None]
    # Bisection again, over ids counted from the end: the highest such that enough are as low as it.
    from_end_V = jnp.uint32(2**31) - jnp.arange(logits_RV.shape[1], dtype=jnp.uint32)

    def enough(cut_R: jax.Array) -> jax.Array:
        low_enough_RV = at_cut_RV & (from_end_V[None] >= cut_R[:, None])
        return jnp.sum(low_enough_RV, axis=-1, dtype=jnp.int32) >= num_at_cut_R

    surplus = jnp.any(jnp.sum(at_cut_RV, axis=-1, dtype=jnp.int32) > num_at_cut_R)
    last_R = jax.lax.cond(
        surplus, lambda: _highest_cut(enough, logits_RV.shape[0]), lambda: jnp.zeros_like(cut_R)
    )
    kept_RV = (key_RV > cut_R[:, None]) | (at_cut_RV & (from_end_V[None] >= last_R[:, None]))
    return jnp.where(kept_RV, logits_RV, NEGATIVE)


def _unpack_bits(words_RW: jax.Array, length: int) -> jax.Array:
    """[R, length] bool from words of 32 bits, lowest bit first."""
    bits = (words_RW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words_RW.shape[0], -1)[:, :length] != 0


def _mix(x: jax.Array) -> jax.Array:
    """A 32-bit finaliser with low bias (MurmurHash3's shape, constants of Wellons's hash prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)
