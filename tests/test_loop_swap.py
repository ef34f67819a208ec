"""A loop that keeps beyond the pool what it has no room for: fetched where that pays, never wrong."""

from __future__ import annotations

import pytest

from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import CacheIdentity
from jaxserve.scheduling.offload import Offload
from jaxserve.scheduling.offload_cost import Rate, TransferRates
from jaxserve.scheduling.offload_tier import HostMemoryTier
from jaxserve.scheduling.page_swap import PageSwap
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_sequence import expected_answer
from tests.policies import UNFORESEEN

CACHE = CacheIdentity(model="fake", kv_format="fake")
LIMITS = make_limits(num_pages=(13, 13), windows=(0, 6), num_slots=3, max_model_len=48)
PROMPT = list(range(20, 50))
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)


def make_swap(engine: FakeEngine, bytes_per_second: float) -> tuple[PageSwap, list[HostMemoryTier]]:
    tiers = [HostMemoryTier(100, size) for size in engine.page_bytes]
    offload = Offload(tiers, engine, LIMITS.page_size, LIMITS.windows)
    return PageSwap(
        offload, TransferRates(Rate(bytes_per_second), Rate(bytes_per_second)), lambda: 0.0
    ), tiers


def answer(loop: HostLoop, name: str, prompt: list[int]) -> int:
    """Serve one request, check its answer, and return how many tokens of its prompt were not computed."""
    loop.add(name, prompt, PARAMS)
    (output,) = [delta.output for delta in loop.run_until_idle() if delta.output is not None]
    assert output.outputs[0].token_ids == expected_answer(LIMITS, prompt, PARAMS, 0)[0]
    loop.check_integrity()
    return output.num_cached_tokens


@pytest.mark.parametrize(("bytes_per_second", "num_restored"), [(1e12, 6), (1.0, 0)])
def test_an_evicted_prompt_is_fetched_where_that_is_quicker(
    bytes_per_second: float, num_restored: int
) -> None:
    engine = FakeEngine(LIMITS)
    swap, _ = make_swap(engine, bytes_per_second)
    loop = HostLoop(engine, cache=CACHE, swap=swap)
    assert answer(loop, "first", PROMPT) == 0
    assert answer(loop, "other", [number + 1 for number in PROMPT]) == 0
    # The pool has kept the first page.
    assert answer(loop, "again", PROMPT) == LIMITS.page_size * (1 + num_restored)
    assert swap.statistics.restored_pages == num_restored


def test_damaged_pages_are_computed_again() -> None:
    engine = FakeEngine(LIMITS)
    swap, tiers = make_swap(engine, 1e12)
    loop = HostLoop(engine, cache=CACHE, swap=swap)
    answer(loop, "first", PROMPT)
    answer(loop, "other", [number + 1 for number in PROMPT])
    for tier in tiers:
        for slot in range(tier.num_slots):
            (data,) = tier.read([slot]).take()
            assert data is not None
            tier.write(slot, data ^ 1)
    assert answer(loop, "again", PROMPT) == LIMITS.page_size, "what the pool has kept"
    assert swap.statistics.damaged_pages


def test_forgetting_the_cache_forgets_what_is_kept_beyond_the_pool() -> None:
    engine = FakeEngine(LIMITS)
    swap, _ = make_swap(engine, 1e12)
    loop = HostLoop(engine, cache=CACHE, swap=swap)
    answer(loop, "first", PROMPT)
    loop.clear_prefix_cache()
    assert answer(loop, "again", PROMPT) == 0


def test_a_preempted_request_is_swapped() -> None:
    engine = FakeEngine(LIMITS)
    swap, _ = make_swap(engine, 1e12)
    loop = HostLoop(engine, cache=CACHE, swap=swap, policy=UNFORESEEN)
    prompts = [[start + number for number in range(20)] for start in (3, 30, 60)]
    params = SamplingParams(max_tokens=26, ignore_eos=True, seed=0)
    for name, prompt in enumerate(prompts):
        loop.add(str(name), prompt, params)
    outputs = [delta.output for delta in loop.run_until_idle() if delta.output is not None]
    for output in outputs:
        expected = expected_answer(LIMITS, prompts[int(output.request_id)], params, 0)
        assert output.outputs[0].token_ids == expected[0]
    loop.check_integrity()
    assert loop.snapshot().num_preemptions
    assert swap.statistics.restored_pages
    assert loop.snapshot().swaps == swap.statistics


def test_a_lost_device_leaves_nothing_to_wait_for() -> None:
    engine = FakeEngine(LIMITS, fail_at=1)
    swap, _ = make_swap(engine, 1e12)
    loop = HostLoop(engine, cache=CACHE, swap=swap)
    loop.add("a", PROMPT, PARAMS)
    with pytest.raises(RuntimeError, match="the device has gone"):
        list(loop.run_until_idle())
    loop.take_deltas()
    assert loop.idle


def test_pages_are_kept_only_where_prefixes_are_reused() -> None:
    engine = FakeEngine(LIMITS)
    with pytest.raises(ValueError, match="prefixes to be reused, which is off"):
        HostLoop(engine, swap=make_swap(engine, 1e12)[0])
