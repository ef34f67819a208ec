"""The configuration is read strictly, and fixes every request."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.bench.asks import Ask, Draw, digest_of, plan_digest
from jaxserve.bench.cells import cells_of, digest_of_plan, schedule
from jaxserve.bench.config import BenchConfig

SCENARIOS: dict[str, dict[str, Any]] = {
    "burst": {"kind": "burst", "size": 3, "bursts": 2},
    "cancellations": {"kind": "cancellations", "requests": 9, "share": 0.34},
    "retries": {"kind": "retries", "requests": 5},
    "tenants": {"kind": "tenants", "requests": 12, "shares": {"big": 3, "small": 1}},
    "inversions": {"kind": "inversions", "patient": 4, "urgent": 2},
    "failure": {"kind": "failure", "requests": 4},
}
FULL: dict[str, Any] = {
    "seed": 5,
    "repeats": 2,
    "requests": 3,
    "matrix": {"uncached": [4, 6], "prefix": [0, 8], "sampling": ["greedy", "warm"], "concurrency": [2]},
    "sampling": {"greedy": {}, "warm": {"temperature": 0.7, "top_p": 0.9}},
    "scenario": SCENARIOS,
}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_plan_s_name_is_that_of_its_list(count: int) -> None:
    listed = [Ask(token_ids=[place], max_tokens=2) for place in range(count)]
    assert plan_digest(iter(listed)) == digest_of([asdict(ask) for ask in listed])


def asks(config: BenchConfig) -> dict[tuple[str, int], list[Ask]]:
    return {
        (cell.name, repeat): [*(work := cell.work(config, repeat)).primers, *work.asks]
        for repeat, cell in schedule(config, cells_of(config))
    }


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_the_plan_is_a_function_of_the_seed(seed: int) -> None:
    few = FULL | {"requests": 1, "matrix": {"uncached": [4], "prefix": [0, 8], "concurrency": [2]}}
    one, again = (BenchConfig.from_mapping(few | {"seed": seed}) for _ in range(2))
    other = BenchConfig.from_mapping(few | {"seed": (seed + 1) % 2**32})
    assert asks(one) == asks(again)
    assert digest_of_plan(one) == digest_of_plan(again) != digest_of_plan(other)


def test_a_cell_is_planned_alike_whatever_is_beside_it() -> None:
    alone = BenchConfig.from_mapping({"seed": 5, "repeats": 2, "scenario": {"burst": SCENARIOS["burst"]}})
    assert asks(alone)["burst", 1] == asks(BenchConfig.from_mapping(FULL))["burst", 1]


def test_repeats_and_cells_have_requests_of_their_own() -> None:
    planned = asks(BenchConfig.from_mapping(FULL)).values()
    prompts = [tuple(ask.token_ids) for asked in planned for ask in asked]
    assert len(set(prompts)) == len(prompts)


def test_the_matrix_has_every_combination_and_counts_its_requests() -> None:
    config = BenchConfig.from_mapping(FULL)
    cells = [cell for cell in cells_of(config) if cell.kind == "matrix"]
    # 2 lengths, 2 ways to sample; a prefix is cold or warm, none is cold alone.
    assert len(cells) == 2 * 2 * 3
    assert config.num_requests == 2 * (12 * 3 + 6 + 9 + 5 + 12 + 6 + 4)
    rounds = schedule(config, cells_of(config))
    assert config.num_requests == sum(len(cell.work(config, repeat).asks) for repeat, cell in rounds)


def test_warm_requests_share_their_prefix_and_cold_ones_share_nothing() -> None:
    config = BenchConfig.from_mapping({"matrix": {"uncached": [4], "prefix": [8], "concurrency": [2]}})
    cold, warm = (cell.work(config, 0) for cell in cells_of(config))
    assert len({tuple(ask.token_ids[:8]) for ask in (*warm.primers, *warm.asks)}) == 1
    assert len({ask.body("m", "space")["cache_salt"] for ask in (*warm.primers, *warm.asks)}) == 1
    assert not cold.primers
    assert len({tuple(ask.token_ids[:8]) for ask in cold.asks}) == len(cold.asks)
    assert len({ask.body("m", "space")["cache_salt"] for ask in cold.asks}) == len(cold.asks)
    assert {len(ask.token_ids) for ask in (*cold.asks, *warm.asks)} == {12}


def test_every_round_has_an_order_of_its_own() -> None:
    config = BenchConfig.from_mapping(FULL)
    order = [cell.name for _, cell in schedule(config, cells_of(config))]
    first, second = order[: len(order) // 2], order[len(order) // 2 :]
    assert sorted(first) == sorted(second)
    assert first != second


def test_scenarios_plan_what_they_say() -> None:
    config = BenchConfig.from_mapping(FULL)
    plans = {cell.name: cell.work(config, 0).asks for cell in cells_of(config)}
    assert [ask.arrival for ask in plans["burst"]] == [0.0] * 3 + [2.0] * 3
    assert [ask.leave_after for ask in plans["cancellations"]].count(4) == 3
    assert {ask.attempts for ask in plans["retries"]} == {4}
    assert {ask.tenant for ask in plans["tenants"]} == {"big", "small"}
    assert {(ask.priority, ask.max_tokens) for ask in plans["inversions"]} == {
        ("batch", 64),
        ("interactive", 32),
    }
    assert len({ask.regex for ask in plans["failure"]}) == 4
    for planned in plans.values():
        assert [ask.arrival for ask in planned] == sorted(ask.arrival for ask in planned)


def test_the_digest_is_that_of_every_setting() -> None:
    config = BenchConfig.from_mapping(FULL)
    assert config.digest == BenchConfig.from_mapping(FULL).digest
    changed = [
        FULL | {"request_seconds": 61.0},
        FULL | {"limits": {"ttft": 2.0}},
        FULL | {"scenario": SCENARIOS | {"burst": {"kind": "burst", "size": 4, "bursts": 2}}},
    ]
    assert len({config.digest, *(BenchConfig.from_mapping(one).digest for one in changed)}) == 4


def test_a_draw_picks_the_share() -> None:
    draw = Draw(0, "cell", 0, 256)
    assert len(draw.chosen(10, 0.25)) == 2
    assert draw.chosen(10, 0.0) == frozenset()
    assert draw.chosen(10, 1.0) == frozenset(range(10))


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"request": 3}, "request is not a setting; there are"),
        ({"repeats": 0}, "repeats 0 is out of range: it must be from 1 to 1000"),
        ({"repeats": True}, "repeats True is not a whole number"),
        ({"name": ""}, "name '' is not a line"),
        ({"limits": {"ttft": -1.0}}, r"limits\.ttft -1\.0 is out of range"),
        ({"limits": 3}, "limits 3 is not a table"),
        ({"matrix": {"uncached": [0]}}, r"matrix\.uncached 0 is not a whole number from 1"),
        ({"matrix": {"uncached": []}}, r"matrix\.uncached \(\) is not a list"),
        ({"matrix": {"output": 7}}, r"matrix\.output 7 is not a list"),
        ({"matrix": {"prefix": [1, 1]}}, r"matrix\.prefix \[1, 1\] names a value twice"),
        ({"matrix": {"cache": ["hot"]}}, r"matrix\.cache 'hot' is not known; there are cold, warm"),
        ({"matrix": {"cache": ["warm"]}}, "there is nothing to ask"),
        ({"matrix": {"sampling": ["wild"]}}, "'wild' is no table under sampling: greedy"),
        (
            {"sampling": {"greedy": {"temperature": 9.0}}},
            r"greedy\.temperature 9\.0 is out of range",
        ),
        ({"scenario": {"x": {"kind": "storm"}}}, r"scenario\.x\.kind 'storm' is not known; there are burst"),
        ({"scenario": {"x": {"kind": "burst", "rate": 1.0}}}, r"scenario\.x\.rate is not a setting"),
        (
            {"scenario": {"x": {"kind": "tenants", "shares": {"a": 0}}}},
            r"shares\.a 0 is not a number",
        ),
        ({"scenario": {"x": {"kind": "failure", "breaks": "disk"}}}, "breaks 'disk' is not known"),
        ({"scenario": {"x": {"kind": "failure", "command": ["true"]}}}, "do not go together"),
        ({"requests": 20_000}, "limit is 10000"),
    ],
)
def test_what_is_wrong_is_named(table: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        BenchConfig.from_mapping(table)


def test_a_file_is_named_with_its_fault(tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text("repeats = 2\n[matrix]\nuncached = [8]\n[scenario.calm]\nkind = 'burst'\nsize = 1\n")
    config = BenchConfig.read(path)
    assert (config.repeats, config.as_json["scenario"]["calm"]["kind"]) == (2, "burst")
    for text in ("repeats = ", "repeats = 'two'"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"bench\.toml: "):
            BenchConfig.read(path)
