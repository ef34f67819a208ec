"""What prepares a slot between steps: grammar masks and copied pages, on engines driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import CacheConfig, EngineConfig, LayerKind, ModelConfig
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.slots import copy_pages, pack_copies
from jaxserve.engine.state import make_state
from jaxserve.model.cache import page_layouts
from jaxserve.plan import SamplingParams, SequencePlan, SlotLoad, StepPlan, StepResult, pack_token_ids
from tests.engine.models import small_engine
from tests.oracle.tiny_models import write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=5)
SAMPLED = SamplingParams(temperature=1.5, max_tokens=50, ignore_eos=True, logprobs=5)
PROMPT = tuple(range(3, 40))
PAGES = 6
"""Of each slot and group: room for 96 tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def engine(model: Path) -> DeviceEngine:
    """Full and window attention, log-probabilities of what was sampled from."""
    return small_engine(model, logprobs_mode="processed")


def own_pages(engine: DeviceEngine, slot: int) -> tuple[tuple[int, ...], ...]:
    first = 1 + slot * PAGES
    return (tuple(range(first, first + PAGES)),) * len(engine.limits.windows)


def load(engine: DeviceEngine, slot: int, params: SamplingParams = GREEDY, **changes: Any) -> SlotLoad:
    fields: dict[str, Any] = {
        "slot": slot,
        "tokens": PROMPT,
        "num_prompt_tokens": len(PROMPT),
        "num_computed": 0,
        "pages": own_pages(engine, slot),
        "params": params,
        "seed": slot,
        "sample_index": 0,
    }
    return SlotLoad(**(fields | changes))


def step(engine: DeviceEngine, rows: Sequence[tuple[int, int]]) -> StepResult:
    """One step of (slot, rows) sequences."""
    sequences = [SequencePlan(slot, num_tokens) for slot, num_tokens in rows]
    decode = all(num_tokens == 1 for _, num_tokens in rows)
    shape = engine.limits.fit(sum(num for _, num in rows), len(rows), len(rows), decode)
    return engine.collect(engine.dispatch(StepPlan.of(sequences, (), shape)))


def answers(
    engine: DeviceEngine,
    loads: Sequence[SlotLoad],
    num_tokens: int,
    before_step: Callable[[int], None] = lambda number: None,
) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of loads served together, each prompt in a step of its own."""
    for one in loads:
        engine.load_slot(one)
    rows = [(one.slot, len(one.tokens) - one.num_computed) for one in loads]
    collected: list[list[tuple[int, float]]] = [[] for _ in loads]
    for number in range(num_tokens):
        before_step(number)
        if number:
            results = [step(engine, [(one.slot, 1) for one in loads])]
        else:
            results = [step(engine, [row]) for row in rows]
        tokens, logprobs = (
            np.concatenate([getattr(result, name) for result in results]) for name in ("tokens", "logprobs")
        )
        for answer, token, logprob in zip(collected, tokens.tolist(), logprobs.tolist(), strict=True):
            answer.append((token, logprob))
    return collected


def mask_of(engine: DeviceEngine, token_ids: Sequence[int]) -> np.ndarray:
    return pack_token_ids(token_ids, engine.limits.vocab_size)


def test_masks_are_obeyed_and_leave_other_slots_alone(engine: DeviceEngine) -> None:
    plain = answers(
        engine, [load(engine, 0), load(engine, 1, SAMPLED), load(engine, 2), load(engine, 3, SAMPLED)], 8
    )
    allowed = [[10 + number, 50 + number, 90] for number in range(8)]

    def before_step(number: int) -> None:
        if number:
            mask = mask_of(engine, allowed[number])
            engine.load_masks(np.array([2, 3], np.int32), np.stack([mask, mask]))

    first = mask_of(engine, allowed[0])
    masked = answers(
        engine,
        [
            load(engine, 0),
            load(engine, 1, SAMPLED),
            load(engine, 2, mask=first),
            load(engine, 3, SAMPLED, mask=first),
        ],
        8,
        before_step,
    )
    assert masked[:2] == plain[:2]  # bitwise, log-probabilities too
    for number, token_ids in enumerate(allowed):
        for answer in masked[2:]:
            token, logprob = answer[number]
            assert token in token_ids
            assert -8.0 < logprob <= 0.0  # of three tokens, not of the vocabulary
    assert [token for token, _ in masked[2]] != [token for token, _ in plain[2]]


def test_log_probabilities_tell_the_mask(engine: DeviceEngine) -> None:
    engine.load_slot(load(engine, 0, mask=mask_of(engine, [7, 8])))
    result = step(engine, [(0, len(PROMPT))])
    assert set(result.top_tokens[0, :2]) == {7, 8}
    assert np.exp(result.top_logprobs[0, :2]).sum() == pytest.approx(1.0, abs=1e-5)
    assert np.isneginf(result.top_logprobs[0, 2:5]).all()


def test_a_load_ends_the_mask_of_the_slot(engine: DeviceEngine) -> None:
    plain = answers(engine, [load(engine, 1)], 3)
    answers(engine, [load(engine, 1, mask=mask_of(engine, [5]))], 3)
    assert answers(engine, [load(engine, 1)], 3) == plain


def test_masks_of_every_slot_at_once(engine: DeviceEngine) -> None:
    slots = np.arange(4, dtype=np.int32)
    for slot in slots.tolist():
        engine.load_slot(load(engine, slot))
        step(engine, [(slot, len(PROMPT))])
    engine.load_masks(slots, np.stack([mask_of(engine, [20 + slot]) for slot in slots]))
    assert step(engine, [(slot, 1) for slot in slots.tolist()]).tokens.tolist() == [20, 21, 22, 23]


def test_allowed_bad_and_minimum_hold_beside_a_grammar(engine: DeviceEngine) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=9, min_tokens=5, allowed_token_ids=[4, 5, 6], bad_token_ids=[6]
    )
    engine.load_slot(load(engine, 0, params, eos_token_ids=(5,), mask=mask_of(engine, [4, 5, 6, 7])))
    assert step(engine, [(0, len(PROMPT))]).tokens.tolist() == [4]  # 5 would end it, 6 is bad, 7 not allowed
    engine.load_masks(np.array([0], np.int32), mask_of(engine, [5, 7])[None])
    assert step(engine, [(0, 1)]).tokens.tolist() == [5]  # only the end may come, so it may


def test_masks_that_do_not_fit_are_named(engine: DeviceEngine) -> None:
    with pytest.raises(ValueError, match=r"masks \(1, 2\) for 1 slots"):
        engine.load_masks(np.zeros(1, np.int32), np.zeros((1, 2), np.uint32))
    with pytest.raises(ValueError, match="for 5 slots; there are 4"):
        engine.load_masks(np.zeros(5, np.int32), np.stack([mask_of(engine, [1])] * 5))
    with pytest.raises(ValueError, match="a mask of shape"):
        engine.load_slot(load(engine, 0, mask=np.zeros(1, np.uint32)))


def test_a_slot_may_start_inside_a_copied_page(engine: DeviceEngine) -> None:
    before = engine.compiles_after_ready
    check_copied_page(engine)
    assert engine.compiles_after_ready == before


def test_a_copied_page_brings_its_scales(tmp_path: Path) -> None:
    check_copied_page(small_engine(write_tiny_model("qwen3", tmp_path), kv_format="int8"))


def check_copied_page(engine: DeviceEngine) -> None:
    """The first slot's text goes on on its own page while the second starts on a copy of it."""
    cold = answers(engine, [load(engine, 0, SAMPLED)], 12)
    num_computed, page, untouched = 21, 1, own_pages(engine, 7)
    copies, pages = [], []
    for group, (theirs, ours) in enumerate(zip(own_pages(engine, 0), untouched, strict=True)):
        copies.append((group, theirs[page], ours[page]))
        pages.append((theirs[0], *ours[1:]))
    warm = load(
        engine, 1, SAMPLED, num_computed=num_computed, pages=tuple(pages), copies=tuple(copies), seed=0
    )
    assert answers(engine, [warm], 12) == cold
    again = load(engine, 2, SAMPLED, num_computed=30, pages=own_pages(engine, 0), seed=0)
    assert answers(engine, [again], 12) == cold  # whose pages the copy has left alone


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8"])
def test_a_copy_takes_no_second_pool(kv_format: Any) -> None:
    model = ModelConfig(
        family="gemma3_text",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=2,
        head_size=64,
        layers=(LayerKind(), LayerKind(window=32)) * 3,
        max_position=64,
    )
    config = EngineConfig(
        model=model,
        cache=CacheConfig(page_size=16, num_pages=(500, 300), kv_format=kv_format),
        max_model_len=64,
        num_slots=2,
        decode_rows=(2,),
        chunk_rows=(8,),
    )
    state = jax.eval_shape(lambda: make_state(config, page_layouts(config, "cpu")))
    num_pages = config.cache.num_pages
    program = jax.jit(lambda state, copies: copy_pages(state, copies, num_pages), donate_argnums=0)
    memory = program.lower(state, pack_copies((), num_pages)).compile().memory_analysis()
    assert memory is not None
    page_bytes = max(layout.num_bytes(1) // layout.num_pages for layout in page_layouts(config, "cpu"))
    assert memory.temp_size_in_bytes < 8 * page_bytes < memory.alias_size_in_bytes / 50


def test_copies_that_do_not_fit_are_named(engine: DeviceEngine) -> None:
    for copies, message in (
        (((2, 1, 2),), "in group 2"),
        (((0, 0, 2),), "copy of page 0"),
        (((0, 1, 64),), "to 64"),
        (((0, 1, 2), (0, 3, 4)), "two page copies in group 0"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_slot(load(engine, 0, copies=copies))
