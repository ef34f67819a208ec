"""Recorded conversations through the tree: what can be reused is, and at no pool size less than with LRU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prefix_cache import compare, ideal_hits, page_cost, prompts_of, replay_lru, replay_tree
from jaxserve.planning.trace_files import read_trace


@pytest.fixture(scope="module")
def prompts(shared_data: Path) -> list[list[int]]:
    return prompts_of(read_trace(shared_data / "traces/mooncake/conversation_trace.jsonl"))


def test_an_unbounded_pool_reaches_the_trace_s_ideal(prompts: list[list[int]]) -> None:
    total = sum(map(len, prompts))
    statistics = replay_tree(prompts, total, page_cost(0.0)).statistics
    assert statistics.query_tokens == total
    assert statistics.hit_tokens == ideal_hits(prompts) > total // 3


@pytest.mark.slow
def test_no_pool_saves_less_prefill_than_with_plain_lru(prompts: list[list[int]]) -> None:
    rows = compare(prompts, [3_500, 14_000, 50_000], pair_share=0.017)
    rows += compare(prompts, [700, 10_000, 50_000], pair_share=0.0)
    rows += compare(prompts, [700], pair_share=0.1)
    for size, ours, lru in rows:
        assert ours >= lru > 0, f"a pool of {size} pages"
    assert max(ours / lru for _, ours, lru in rows) > 1.01


def test_the_plain_cache_is_one() -> None:
    def cost(start: int, num_pages: int) -> float:
        return float(num_pages)

    assert replay_lru([[1, 2], [3], [1, 2], [4], [1, 2, 3]], 3, cost) == 4
    assert replay_lru([[1, 2], [3, 4], [1, 2]], 3, cost) == 1, "the leaf went, and its parent stayed"
    assert replay_lru([[1, 2, 3, 4], [1, 2, 3, 4]], 3, cost) == 3
