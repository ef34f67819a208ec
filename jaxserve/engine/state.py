"""The device state: everything that a step reads and writes, donated from step to step."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.model.cache import Cache, make_cache
from jaxserve.plan import MAX_BIASES, MAX_STOP_IDS, SlotLoad
from pallas_kernels.page_layout import PageLayout

MAX_EOS_IDS = 8
PROMPT_FLAG = 1 << 30
"""Added to a token's count if the prompt holds it."""
FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@flax.struct.dataclass
class SlotSampling:
    """How each slot samples. N + 1 rows: the last is the padding's."""

    floats: jax.Array
    """[N + 1, 6] float32, in the order of FLOAT_FIELDS."""
    top_k: jax.Array
    """[N + 1] int32, 0 for all."""
    key: jax.Array
    """[N + 1, 2] uint32, from the request's seed and its sample's index."""
    min_len: jax.Array
    """[N + 1] int32 known tokens below which no stop id is sampled."""
    stop_ids: jax.Array
    """[N + 1, MAX_STOP_IDS + MAX_EOS_IDS] int32 ids withheld below min_len, -1 where unused."""
    bias_ids: jax.Array
    """[N + 1, MAX_BIASES] int32, V (out of range) where unused."""
    bias_values: jax.Array
    """[N + 1, MAX_BIASES] float32."""
    allowed: jax.Array
    """[N + 1, ceil(V / 32)] uint32, a bit for each token that may be sampled."""
    masked: jax.Array
    """[N + 1] bool, whether any bit of `allowed` is clear."""
    num_biases: jax.Array
    """[N + 1] int32."""
    wants_logprobs: jax.Array
    """[N + 1] bool."""


@flax.struct.dataclass
class DeviceState:
    """The authority on every slot. N slots, M tokens at most, G cache groups, P pages a sequence."""

    cache: Cache
    page_table: jax.Array
    """[G, N + 1, P] int32 page ids; an entry counts once it is granted."""
    tokens: jax.Array
    """[N + 1, M + 1] int32 known tokens of each slot: the prompt, then what was sampled."""
    num_known: jax.Array
    """[N + 1] int32."""
    num_computed: jax.Array
    """[N + 1] int32 tokens whose keys and values are on pages."""
    counts: jax.Array
    """[N + 1, V] int32 occurrences in the answer, plus PROMPT_FLAG; kept only where penalties are used."""
    sampling: SlotSampling


def make_state(config: EngineConfig, layouts: tuple[PageLayout, ...]) -> DeviceState:
    """An empty state."""
    rows, vocab = config.num_slots + 1, config.model.vocab_size
    stop_width = MAX_STOP_IDS + MAX_EOS_IDS
    sampling = SlotSampling(
        floats=jnp.zeros((rows, len(FLOAT_FIELDS)), jnp.float32),
        top_k=jnp.zeros((rows,), jnp.int32),
        key=jnp.zeros((rows, 2), jnp.uint32),
        min_len=jnp.zeros((rows,), jnp.int32),
        stop_ids=jnp.full((rows, stop_width), -1, jnp.int32),
        bias_ids=jnp.full((rows, MAX_BIASES), vocab, jnp.int32),
        bias_values=jnp.zeros((rows, MAX_BIASES), jnp.float32),
        allowed=jnp.full((rows, mask_words(vocab)), 0xFFFFFFFF, jnp.uint32),
        masked=jnp.zeros((rows,), jnp.bool_),
        num_biases=jnp.zeros((rows,), jnp.int32),
        wants_logprobs=jnp.zeros((rows,), jnp.bool_),
    )
    return DeviceState(
        cache=make_cache(config, layouts),
        page_table=jnp.zeros((len(layouts), rows, config.pages_per_sequence), jnp.int32),
        tokens=jnp.zeros((rows, config.max_model_len + 1), jnp.int32),
        num_known=jnp.zeros((rows,), jnp.int32),
        num_computed=jnp.zeros((rows,), jnp.int32),
        counts=jnp.zeros((rows, vocab), jnp.int32),
        sampling=sampling,
    )


@flax.struct.dataclass
class PackedLoad:
    """A SlotLoad as the few arrays that travel to the device."""

    scalars: np.ndarray
    """[9] int32: slot, known, computed, prompt, top_k, min_len, masked, num_biases, wants_logprobs."""
    key: np.ndarray
    floats: np.ndarray
    tokens: np.ndarray
    pages: np.ndarray
    stop_ids: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    allowed: np.ndarray


def pack_load(load: SlotLoad, config: EngineConfig) -> PackedLoad:
    """A load as arrays of fixed shapes.

    Raises ValueError, naming the value and the limit, if it does not fit the engine.
    """
    params, vocab = load.params, config.model.vocab_size
    if len(load.tokens) > config.max_model_len:
        raise ValueError(f"{len(load.tokens)} tokens; max_model_len is {config.max_model_len}")
    stop_ids = sorted({*load.eos_token_ids, *params.stop_token_ids})
    if params.min_tokens and len(stop_ids) > MAX_STOP_IDS + MAX_EOS_IDS:
        raise ValueError(
            f"min_tokens with {len(stop_ids)} stop ids; the limit is {MAX_STOP_IDS + MAX_EOS_IDS}"
        )
    biases = dict(params.logit_bias or {})
    allowed, masked = _allowed_bits(load, vocab)
    pages = np.zeros((len(load.pages), config.pages_per_sequence), np.int32)
    for group, ids in enumerate(load.pages):
        pages[group, : len(ids)] = ids
    scalars = [
        load.slot,
        len(load.tokens),
        load.num_computed,
        load.num_prompt_tokens,
        max(params.top_k, 0),
        load.num_prompt_tokens + params.min_tokens,
        masked,
        len(biases),
        params.logprobs is not None or params.prompt_logprobs is not None,
    ]
    return PackedLoad(
        scalars=np.array(scalars, np.int32),
        key=seed_words(load.seed, load.sample_index),
        floats=np.array([getattr(params, name) for name in FLOAT_FIELDS], np.float32),
        tokens=_padded(load.tokens, config.max_model_len + 1, 0, np.int32),
        pages=pages,
        stop_ids=_padded(stop_ids if params.min_tokens else (), MAX_STOP_IDS + MAX_EOS_IDS, -1, np.int32),
        bias_ids=_padded(biases.keys(), MAX_BIASES, vocab, np.int32),
        bias_values=_padded(biases.values(), MAX_BIASES, 0.0, np.float32),
        allowed=allowed,
    )


def load_slot(state: DeviceState, load: PackedLoad) -> DeviceState:
    """Fill one slot; the device half of `StepEngine.load_slot`."""
    slot, known, computed, num_prompt, top_k, min_len, masked, num_biases, wants_logprobs = load.scalars
    counts_V = _count_tokens(load, state.counts.shape[1], known, num_prompt)
    sampling = state.sampling
    sampling = dataclasses.replace(
        sampling,
        floats=sampling.floats.at[slot].set(load.floats),
        top_k=sampling.top_k.at[slot].set(top_k),
        key=sampling.key.at[slot].set(load.key),
        min_len=sampling.min_len.at[slot].set(min_len),
        stop_ids=sampling.stop_ids.at[slot].set(load.stop_ids),
        bias_ids=sampling.bias_ids.at[slot].set(load.bias_ids),
        bias_values=sampling.bias_values.at[slot].set(load.bias_values),
        allowed=sampling.allowed.at[slot].set(load.allowed),
        masked=sampling.masked.at[slot].set(masked != 0),
        num_biases=sampling.num_biases.at[slot].set(num_biases),
        wants_logprobs=sampling.wants_logprobs.at[slot].set(wants_logprobs != 0),
    )
    return dataclasses.replace(
        state,
        page_table=state.page_table.at[:, slot].set(load.pages),
        tokens=state.tokens.at[slot].set(load.tokens),
        num_known=state.num_known.at[slot].set(known),
        num_computed=state.num_computed.at[slot].set(computed),
        counts=state.counts.at[slot].set(counts_V),
        sampling=sampling,
    )


def seed_words(seed: int, sample_index: int) -> np.ndarray:
    """Two uint32 words that differ in every bit between neighbouring seeds and samples.

    SplitMix64 (Steele, Lea and Flood 2014) over the seed, then over the sample's index.
    """
    mask = (1 << 64) - 1
    state = seed & mask
    for step in (0, sample_index + 1):
        state = (state + 0x9E3779B97F4A7C15 * (step + 1)) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return np.array([state & 0xFFFFFFFF, state >> 32], np.uint32)


def mask_words(vocab_size: int) -> int:
    """uint32 words that hold a bit for each token."""
    return -(-vocab_size // 32)


def _count_tokens(load: PackedLoad, vocab: int, known: jax.Array, num_prompt: jax.Array) -> jax.Array:
    """[V] counts of the answer so far and flags of the prompt; zeros if no penalty will read them."""

    def count() -> jax.Array:
        position = jnp.arange(load.tokens.shape[0], dtype=jnp.int32)
        answered = ((position >= num_prompt) & (position < known)).astype(jnp.int32)
        prompted = jnp.zeros((vocab,), jnp.bool_).at[load.tokens].max(position < num_prompt)
        return jnp.zeros((vocab,), jnp.int32).at[load.tokens].add(answered) + prompted * PROMPT_FLAG

    neutral = jnp.array([1.0, 0.0, 0.0], jnp.float32)
    return jax.lax.cond(jnp.any(load.floats[3:] != neutral), count, lambda: jnp.zeros((vocab,), jnp.int32))


def _allowed_bits(load: SlotLoad, vocab: int) -> tuple[np.ndarray, bool]:
    """The bit mask of tokens that may be sampled, and whether it withholds any."""
    allowed_ids, bad_ids = load.params.allowed_token_ids, load.params.bad_token_ids
    if allowed_ids is None and not bad_ids:
        return np.full(mask_words(vocab), 0xFFFFFFFF, np.uint32), False
    bits = np.full(mask_words(vocab) * 32, allowed_ids is None)
    if allowed_ids is not None:
        bits[np.asarray(allowed_ids, np.int64)] = True
    if bad_ids:
        bits[np.asarray(bad_ids, np.int64)] = False
    return np.packbits(bits, bitorder="little").view(np.uint32), True


def _padded(values: object, length: int, filler: float, dtype: type) -> np.ndarray:
    array = np.full(length, filler, dtype)
    listed = np.fromiter(values, dtype)  # type: ignore[arg-type]
    array[: len(listed)] = listed
    return array
