"""The sampler against a plain statement of its transform, and its noise against statistics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import CacheConfig, EngineConfig, LayerKind, ModelConfig
from jaxserve.engine.sampling import Sampled, adjust_logits, gumbel_noise, sample, sampling_rows, truncate
from jaxserve.engine.slots import load_slot, pack_load, seed_words
from jaxserve.engine.state import DeviceState, make_state
from jaxserve.model.cache import page_layouts
from jaxserve.plan import SamplingParams, SlotLoad
from tests.oracle.naive import transform_logits

VOCAB = 96
EOS = (5, 6)
NUM_ROWS = 8


def engine_config(vocab: int = VOCAB) -> EngineConfig:
    model = ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        layers=(LayerKind(),),
        max_position=64,
    )
    return EngineConfig(
        model=model,
        cache=CacheConfig(page_size=16, num_pages=(2,)),
        max_model_len=64,
        num_slots=NUM_ROWS,
        decode_rows=(NUM_ROWS,),
        chunk_rows=(NUM_ROWS,),
    )


CONFIG = engine_config()


@jax.jit
def fill(state: DeviceState, load: object) -> DeviceState:
    return load_slot(state, load)  # type: ignore[arg-type]


@jax.jit
def transformed(state: DeviceState, logits: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = sampling_rows(state, jnp.arange(NUM_ROWS, dtype=jnp.int32), position)
    return truncate(adjust_logits(logits, rows, state), rows), adjust_logits(logits, rows, state)


@jax.jit
def sampled(state: DeviceState, logits: jax.Array, position: jax.Array) -> jax.Array:
    rows = sampling_rows(state, jnp.arange(NUM_ROWS, dtype=jnp.int32), position)
    known = jnp.full((NUM_ROWS,), -1, jnp.int32)
    return sample(logits, rows, state, known, max_logprobs=4, logprobs_mode="raw").token


def load_of(
    slot: int, params: SamplingParams, prompt: list[int], output: list[int], seed: int = 0, index: int = 0
) -> SlotLoad:
    return SlotLoad(
        slot=slot,
        tokens=prompt + output,
        num_prompt_tokens=len(prompt),
        num_computed=0,
        pages=((),),
        params=params,
        seed=seed,
        sample_index=index,
        eos_token_ids=EOS,
    )


token_ids = st.integers(0, VOCAB - 1)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 3, 20, VOCAB, 500]),
    top_p=st.sampled_from([1.0, 0.999, 0.7, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.none() | st.dictionaries(token_ids, st.sampled_from([-100.0, -1.0, 2.0]), max_size=5),
    allowed_token_ids=st.none() | st.lists(st.integers(20, 60), min_size=2, max_size=20, unique=True),
    bad_token_ids=st.none() | st.lists(st.integers(0, 19), max_size=4),
    min_tokens=st.sampled_from([0, 3, 10]),
    max_tokens=st.just(16),
    stop_token_ids=st.lists(st.integers(61, 90), max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(params_strategy, min_size=NUM_ROWS, max_size=NUM_ROWS),
    seed=st.integers(0, 2**31),
    coarse=st.booleans(),
)
def test_every_row_of_a_mixed_batch_is_transformed_as_stated(
    rows: list[SamplingParams], seed: int, coarse: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (NUM_ROWS, VOCAB)).astype(np.float32)
    if coarse:  # Many equal logits: the lowest ids must win.
        logits = np.round(logits)
    state = make_state(CONFIG, page_layouts(CONFIG, "cpu"))
    texts = []
    for slot, params in enumerate(rows):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 12)).tolist()
        output = rng.integers(0, VOCAB, rng.integers(0, 12)).tolist()
        texts.append((prompt, output))
        state = fill(state, pack_load(load_of(slot, params, prompt, output), CONFIG))
    position = jnp.array([len(prompt) + len(output) for prompt, output in texts], jnp.int32)
    ours = np.asarray(transformed(state, jnp.asarray(logits), position)[0])
    tokens = np.asarray(sampled(state, jnp.asarray(logits), position))
    for row, (params, (prompt, output)) in enumerate(zip(rows, texts, strict=True)):
        expected = transform_logits(logits[row], params, prompt, output, EOS)
        assert_same_support(ours[row], expected, params)
        kept = np.isfinite(expected) & np.isfinite(ours[row])
        np.testing.assert_allclose(ours[row][kept], expected[kept], rtol=2e-5, atol=2e-5)
        assert np.isfinite(ours[row][tokens[row]])
        if params.greedy:
            assert tokens[row] == int(np.argmax(ours[row]))


def test_many_rows_are_sampled_as_few() -> None:
    rng = np.random.default_rng(7)
    logits = jnp.asarray(rng.normal(0, 3, (96, VOCAB)), jnp.float32)
    state = make_state(CONFIG, page_layouts(CONFIG, "cpu"))
    settings = [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(top_k=5, top_p=0.9, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, bad_token_ids=[1, 2, 3], min_p=0.1),
    ]
    for slot in range(NUM_ROWS):
        load = load_of(slot, settings[slot % 3], [5, 6, 7], [8], seed=slot)
        state = fill(state, pack_load(load, CONFIG))

    @jax.jit
    def sampled(logits: jax.Array, first: jax.Array) -> Sampled:
        number = first + jnp.arange(len(logits), dtype=jnp.int32)
        rows = sampling_rows(state, number % NUM_ROWS, 4 + number)
        known = jnp.where(number % 7 == 0, 3, -1)
        return sample(logits, rows, state, known, max_logprobs=4, logprobs_mode="processed")

    together = sampled(logits, jnp.int32(0))
    for first in range(0, 96, 8):
        few = sampled(logits[first : first + 8], jnp.int32(first))
        own = jax.tree.map(lambda array, first=first: array[first : first + 8], together)
        np.testing.assert_array_equal(own.token, few.token)
        np.testing.assert_array_equal(own.top_tokens, few.top_tokens)
        np.testing.assert_array_equal(own.rank, few.rank)
        np.testing.assert_allclose(own.logprob, few.logprob, rtol=1e-5, atol=1e-6)


def assert_same_support(ours: np.ndarray, expected: np.ndarray, params: SamplingParams) -> None:
    """The same tokens survive, but for one on the very edge of a float32 sum or quotient."""
    differing = np.flatnonzero(np.isfinite(ours) != np.isfinite(expected))
    if params.top_p == 1.0 and params.min_p in (0.0, 1.0):
        assert differing.size == 0
    assert differing.size <= 1


def test_noise_is_a_function_of_the_request_alone() -> None:
    key = jnp.asarray(np.stack([seed_words(7, 0), seed_words(7, 1), seed_words(8, 0), seed_words(7, 0)]))
    position = jnp.array([3, 3, 3, 4], jnp.int32)
    noise = np.asarray(gumbel_noise(key, position, VOCAB))
    alone = np.asarray(gumbel_noise(key[:1], position[:1], VOCAB))
    np.testing.assert_array_equal(noise[0], alone[0])
    wider = np.asarray(gumbel_noise(key[:1], position[:1], 2 * VOCAB))
    np.testing.assert_array_equal(wider[0, :VOCAB], alone[0])
    for other in (1, 2, 3):
        assert abs(np.corrcoef(noise[0], noise[other])[0, 1]) < 0.5
        assert not np.any(noise[0] == noise[other])


def test_noise_is_standard_gumbel() -> None:
    key = jnp.asarray(np.stack([seed_words(seed, 0) for seed in range(64)]))
    noise = np.asarray(gumbel_noise(key, jnp.arange(64, dtype=jnp.int32), 4096)).ravel()
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)
    sorted_noise = np.sort(noise)
    cdf = np.exp(-np.exp(-sorted_noise))
    steps = np.arange(1, noise.size + 1) / noise.size
    assert np.abs(cdf - steps).max() < 1.63 / np.sqrt(noise.size)  # Kolmogorov-Smirnov at 1 %


@pytest.mark.parametrize("vary", ["seed", "position", "sample_index"])
def test_sampled_frequencies_are_the_probabilities(vary: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1.5, VOCAB).astype(np.float32)
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    num_draws = 20_000
    numbers = np.arange(num_draws)
    words = [
        seed_words(int(n) if vary == "seed" else 0, int(n) if vary == "sample_index" else 0) for n in numbers
    ]
    position = numbers if vary == "position" else np.zeros_like(numbers)
    noise = gumbel_noise(jnp.asarray(np.stack(words)), jnp.asarray(position, jnp.int32), VOCAB)
    tokens = np.asarray(jnp.argmax(jnp.asarray(logits)[None] + noise, axis=-1))
    counts = np.bincount(tokens, minlength=VOCAB)
    chi_square = ((counts - num_draws * expected) ** 2 / (num_draws * expected)).sum()
    degrees = VOCAB - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


def test_a_token_set_larger_than_the_row_keeps_all() -> None:
    state = make_state(CONFIG, page_layouts(CONFIG, "cpu"))
    params = SamplingParams(top_k=VOCAB + 1, top_p=1.0)
    for slot in range(NUM_ROWS):
        state = fill(state, pack_load(load_of(slot, params, [1], []), CONFIG))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(NUM_ROWS, VOCAB)), jnp.float32)
    kept = np.asarray(transformed(state, logits, jnp.ones((NUM_ROWS,), jnp.int32))[0])
    np.testing.assert_array_equal(kept, np.asarray(logits))


def test_a_load_that_does_not_fit_names_the_limit() -> None:
    with pytest.raises(ValueError, match="70 tokens; max_model_len is 64"):
        pack_load(load_of(0, SamplingParams(), [1] * 70, []), CONFIG)


@pytest.mark.parametrize("vocab", [96, 97, 512], ids=["blocks of 32", "no blocks", "blocks of 128"])
def test_greedy_takes_the_lowest_id_among_equals(vocab: int) -> None:
    config = engine_config(vocab)
    state = make_state(config, page_layouts(config, "cpu"))
    random = np.random.default_rng(vocab)
    logits = random.integers(0, 3, (NUM_ROWS, vocab)).astype(np.float32)
    logits[0], logits[1] = -np.inf, 1.0
    logits[2, vocab - 1] = 7.0
    for slot in range(NUM_ROWS):
        greedy = load_of(slot, SamplingParams(temperature=0.0), [1], [])
        state = fill(state, pack_load(greedy, config))
    chosen = sampled(state, jnp.asarray(logits), jnp.ones((NUM_ROWS,), jnp.int32))
    np.testing.assert_array_equal(chosen, np.argmax(logits, axis=-1))
