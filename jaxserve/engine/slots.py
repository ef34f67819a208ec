"""Filling slots: the host's records as arrays of fixed shapes, and their entry in the device state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.state import (
    BIAS_IDS,
    END_IDS,
    FLOAT_FIELDS,
    MAX_EOS_IDS,
    NUM_FLOATS,
    NUM_NUMBERS,
    PROMPT_FLAG,
    STOP_IDS,
    Column,
    DeviceState,
    mask_words,
)
from jaxserve.model.cache import CACHE_AXES, CacheGroup, copy_page
from jaxserve.plan import MAX_STOP_IDS, IntArray, SlotLoad
from sharding import per_shard


@flax.struct.dataclass
class PackedLoad:
    """A SlotLoad as the few arrays that travel to the device."""

    place: np.ndarray
    """[4] int32: slot, known, computed, prompt."""
    floats: np.ndarray
    numbers: np.ndarray
    """[NUM_FLOATS] and [NUM_NUMBERS], rows of `SlotSampling`."""
    masks: np.ndarray
    """[2, ceil(V / 32)] uint32 what the request lets be sampled, and its grammar now."""
    tokens: np.ndarray
    pages: np.ndarray


def pack_load(load: SlotLoad, config: EngineConfig) -> PackedLoad:
    """A load as arrays of fixed shapes.

    Raises ValueError, naming the value and the limit, if it does not fit the engine.
    """
    params, vocab = load.params, config.model.vocab_size
    if len(load.tokens) > config.max_model_len:
        raise ValueError(f"{len(load.tokens)} tokens; max_model_len is {config.max_model_len}")
    stop_ids = sorted({*load.eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
    if len(stop_ids) > MAX_STOP_IDS + MAX_EOS_IDS:
        raise ValueError(
            f"min_tokens with {len(stop_ids)} stop ids; the limit is {MAX_STOP_IDS + MAX_EOS_IDS}"
        )
    if load.mask is not None and load.mask.shape != (mask_words(vocab),):
        raise ValueError(f"a mask of shape {load.mask.shape}; {vocab} tokens take {mask_words(vocab)} words")
    biases = dict(params.logit_bias or {})
    masks = params.permitted_tokens(vocab), load.mask
    settings = [getattr(params, name) for name in FLOAT_FIELDS]
    pages = np.zeros((len(load.pages), config.pages_per_sequence), np.int32)
    for group, ids in enumerate(load.pages):
        pages[group, : len(ids)] = ids
    return PackedLoad(
        place=np.array([load.slot, len(load.tokens), load.num_computed, load.num_prompt_tokens], np.int32),
        floats=_padded((*settings, *biases.values()), NUM_FLOATS, 0.0, np.float32),
        numbers=_numbers(
            load, stop_ids, list(biases), masked=any(mask is not None for mask in masks), config=config
        ),
        masks=np.stack([_all_tokens(vocab) if mask is None else mask for mask in masks]),
        tokens=_padded(load.tokens, config.max_model_len + 1, 0, np.int32),
        pages=pages,
    )


def _numbers(
    load: SlotLoad, stop_ids: Sequence[int], bias_ids: Sequence[int], *, masked: bool, config: EngineConfig
) -> np.ndarray:
    """As in `SlotSampling`."""
    params = load.params
    numbers = np.full(NUM_NUMBERS, -1, np.int32)
    numbers[Column.TOP_K] = max(params.top_k, 0)
    numbers[Column.MIN_LEN] = load.num_prompt_tokens + params.min_tokens
    numbers[Column.MAX_KNOWN] = config.max_model_len if load.max_known is None else load.max_known
    numbers[Column.MASKED] = masked
    numbers[Column.NUM_BIASES] = len(bias_ids)
    numbers[Column.WANTS_LOGPROBS] = params.logprobs is not None or params.prompt_logprobs is not None
    numbers[Column.KEY : Column.KEY + 2] = seed_words(load.seed, load.sample_index).view(np.int32)
    numbers[BIAS_IDS] = config.model.vocab_size
    end_ids = _end_ids(load)[: END_IDS.stop - END_IDS.start]
    for columns, ids in ((STOP_IDS, stop_ids), (END_IDS, end_ids), (BIAS_IDS, bias_ids)):
        numbers[columns.start : columns.start + len(ids)] = ids
    return numbers


def load_slot(state: DeviceState, load: PackedLoad) -> DeviceState:
    """Fill one slot; the device half of `StepEngine.load_slot`."""
    slot, known, computed, num_prompt = load.place
    counts_V = _count_tokens(load, state.counts.shape[1], known, num_prompt)
    sampling = state.sampling
    sampling = dataclasses.replace(
        sampling,
        floats=sampling.floats.at[slot].set(load.floats),
        numbers=sampling.numbers.at[slot].set(load.numbers),
        # Masks after drafts are those of whoever had the slot before.
        masks=sampling.masks.at[slot].set(jnp.uint32(0xFFFFFFFF)).at[slot, :2].set(load.masks),
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


def mask_widths(config: EngineConfig) -> tuple[int, ...]:
    """The numbers of masks that a program replaces: most steps have few slots with a grammar."""
    num_slots = config.num_slots
    return tuple(sorted({min(4, num_slots), num_slots, num_slots * (1 + config.max_drafts)}))


def pack_masks(
    slots: IntArray, masks: npt.NDArray[np.uint32], ahead: IntArray | None, config: EngineConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots, how far ahead, and their masks, padded to the next of `mask_widths`.

    Raises ValueError if they do not fit.
    """
    widths, num_words = mask_widths(config), mask_words(config.model.vocab_size)
    if len(slots) > widths[-1] or masks.shape != (len(slots), num_words):
        raise ValueError(
            f"masks {masks.shape} for {len(slots)} slots; there are {config.num_slots} slots, "
            f"and {config.model.vocab_size} tokens take {num_words} words"
        )
    if ahead is None:
        ahead = np.zeros(len(slots), np.int32)
    elif ahead.max(initial=0) > config.max_drafts:
        raise ValueError(f"a mask after {ahead.max()} drafts; there are at most {config.max_drafts}")
    width = next(width for width in widths if width >= len(slots))
    nowhere = config.num_slots + 1  # out of range: the padding's own slot must not seem to have a grammar
    padded = np.zeros((width, num_words), np.uint32)
    padded[: len(slots)] = masks
    return _padded(slots, width, nowhere, np.int32), _padded(ahead, width, 0, np.int32), padded


def pack_reads(reads: IntArray | None, config: EngineConfig) -> np.ndarray:
    """[S, 3] what a draft model is to read, as in `StepPlan.reads`, padded to a row for each slot."""
    packed = np.zeros((config.num_slots, 3), np.int32)
    packed[:, 0] = config.num_slots
    if reads is not None:
        packed[: len(reads)] = reads
    return packed


def load_masks(
    state: DeviceState, slots_X: jax.Array, ahead_X: jax.Array, masks_XW: jax.Array
) -> DeviceState:
    """Replace grammar masks; the device half of `StepEngine.load_masks`."""
    sampling = dataclasses.replace(
        state.sampling,
        masks=state.sampling.masks.at[slots_X, 1 + ahead_X].set(masks_XW, mode="drop"),
        numbers=state.sampling.numbers.at[slots_X, Column.MASKED].set(1, mode="drop"),
    )
    return dataclasses.replace(state, sampling=sampling)


def copy_pages(
    state: DeviceState, copies_G2: jax.Array, num_pages: tuple[int, ...], mesh: Mesh | None = None
) -> DeviceState:
    """Copy in each cache group a (source, target) page of all its layers; page 0 onto itself copies none."""

    def copy(group: CacheGroup, pages: int, source: jax.Array, target: jax.Array) -> CacheGroup:
        own = functools.partial(copy_page, num_pages=pages)
        run = per_shard(own, mesh, in_axes=(CACHE_AXES, (), ()), out_axes=CACHE_AXES)
        return run(group, source, target)

    cache = tuple(
        copy(group, pages, source, target)
        for group, pages, (source, target) in zip(state.cache, num_pages, copies_G2, strict=True)
    )
    return dataclasses.replace(state, cache=cache)


def pack_copies(copies: Sequence[tuple[int, int, int]], num_pages: tuple[int, ...]) -> np.ndarray:
    """[G, 2] int32 source and target pages.

    Raises ValueError for a page or group that does not exist, or a second copy in a group.
    """
    packed = np.zeros((len(num_pages), 2), np.int32)
    for group, source, target in copies:
        if (
            not 0 <= group < len(num_pages)
            or not 0 < min(source, target) <= max(source, target) < num_pages[group]
        ):
            raise ValueError(
                f"copy of page {source} to {target} in group {group}; the groups' pages: {num_pages}"
            )
        if packed[group].any():
            raise ValueError(f"two page copies in group {group}; a load has at most one in each")
        packed[group] = source, target
    return packed


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


def _count_tokens(load: PackedLoad, vocab: int, known: jax.Array, num_prompt: jax.Array) -> jax.Array:
    """[V] counts of the answer so far and flags of the prompt; zeros if no penalty will read them."""

    def count() -> jax.Array:
        position = jnp.arange(load.tokens.shape[0], dtype=jnp.int32)
        answered = ((position >= num_prompt) & (position < known)).astype(jnp.int32)
        prompted = jnp.zeros((vocab,), jnp.bool_).at[load.tokens].max(position < num_prompt)
        return jnp.zeros((vocab,), jnp.int32).at[load.tokens].add(answered) + prompted * PROMPT_FLAG

    neutral = jnp.array([1.0, 0.0, 0.0], jnp.float32)
    penalties = load.floats[FLOAT_FIELDS.index("repetition_penalty") : len(FLOAT_FIELDS)]
    return jax.lax.cond(jnp.any(penalties != neutral), count, lambda: jnp.zeros((vocab,), jnp.int32))


def _end_ids(load: SlotLoad) -> list[int]:
    """What ends the answer. The device keeps as many as it has room for: others are met by the host alone,
    which then drops what was computed past them."""
    ends = (() if load.params.ignore_eos else load.eos_token_ids, load.params.stop_token_ids)
    return list(dict.fromkeys(itertools.chain(*ends)))


def _all_tokens(vocab: int) -> np.ndarray:
    return np.full(mask_words(vocab), 0xFFFFFFFF, np.uint32)


def _padded(values: object, length: int, filler: float, dtype: type) -> np.ndarray:
    array = np.full(length, filler, dtype)
    listed = np.fromiter(values, dtype)  # type: ignore[arg-type]
    array[: len(listed)] = listed
    return array
