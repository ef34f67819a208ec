"""Plans: memory by hand, what must never get worse, and every binding limit in both directions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.planning import MODELS, Chip, CostModel, Efficiency, Footprint, Target, Trace, find_chip
from jaxserve.planning.meshes import ChipMesh
from jaxserve.planning.plan_records import Candidate, Demand, Row, Sizes
from jaxserve.planning.planner import best_row, memory_of, plan
from jaxserve.planning.precision import find_precision
from jaxserve.planning.workload import Lengths, Workload

LLAMA = MODELS["llama-3.1-8b"]
SIZES = Sizes(num_slots=16, max_chunk=512, max_model_len=2048)


def candidate(
    model: ModelConfig = LLAMA,
    chip: Chip | str = "h100",
    mesh: int | ChipMesh = 1,
    precision: str = "bfloat16",
    acceptance: float | None = None,
    kv_format: str = "bfloat16",
) -> Candidate:
    chosen = find_precision(precision)
    cost = CostModel(
        Footprint.of(model),
        find_chip(chip) if isinstance(chip, str) else chip,
        mesh=ChipMesh(tensor=mesh) if isinstance(mesh, int) else mesh,
        weight_format=chosen.weight_format,
        compute_format=chosen.compute_format,
        kv_format=kv_format,
    )
    return Candidate(precision=chosen, cost=cost, others="bfloat16", acceptance=acceptance)


def traffic(prompt: float = 200, output: float = 24, count: int = 48) -> Trace:
    workload = Workload(
        prompt=Lengths(mean=prompt, p95=1.5 * prompt), output=Lengths(mean=output, p95=1.5 * output)
    )
    return workload.trace(count, longest=2048)


def one_row(candidate: Candidate, sizes: Sizes = SIZES, **demand: Any) -> Row:
    (row,) = plan([candidate], Demand(**{"trace": traffic(), "rate": None, **demand}), sizes)
    return row


# Memory ----------------------------------------------------------------------------------------------------


def test_what_has_no_recipe_takes_its_own_format() -> None:
    model = MODELS["llama-3.1-8b"]
    for others in ("float32", "bfloat16"):
        wide, narrow = (find_precision(name).stored_bytes(model, others) for name in ("float32", "bfloat16"))
        assert wide / narrow == pytest.approx(2.0, rel=0.01)
    assert wide == pytest.approx(4 * 8.03e9, rel=0.01)


def test_memory_of_llama_by_hand() -> None:
    memory = memory_of(candidate(), SIZES, 2048)
    # All matrices in two bytes, 65 norms of 4096 in four.
    assert memory.weight_bytes == 2 * 8030261248 + 2 * 65 * 4096
    assert memory.kv_token_bytes == memory.page_token_bytes == 2 * 32 * 8 * 128 * 2
    assert memory.largest_batch == int((0.9 * 80e9 - memory.weight_bytes) // (2048 * 131072))
    eighth = memory_of(candidate(mesh=8), SIZES, 2048)
    assert eighth.weight_bytes == 2 * 8030261248 / 8 + 2 * 65 * 4096 * (1 + 7 / 8)  # Norms are everywhere.
    assert eighth.largest_batch == int((0.9 * 80e9 - eighth.weight_bytes) // (2048 * 131072 / 8))


def test_grouped_queries_and_heads_of_64_take_their_own_room() -> None:
    smol = MODELS["smollm2-135m"]
    memory = memory_of(candidate(smol), SIZES, 2048)
    assert memory.kv_token_bytes == 2 * 30 * 3 * 64 * 2  # 3 KV heads, not 9
    eight_bits = memory_of(candidate(smol, kv_format="int8"), SIZES, 2048)
    assert eight_bits.kv_token_bytes == 2 * 30 * 3 * (64 + 4)


def test_windows_bound_what_a_sequence_holds() -> None:
    windowed = replace(LLAMA, layers=(LayerKind(window=512),) * 31 + (LayerKind(),))
    pages = (512 + 512 + 16 + 63) // 64  # a window, a chunk and a row of each slot
    memory = memory_of(candidate(windowed), SIZES, 16384)
    sequence = 4096 * (31 * pages * 64 + 16384)  # 4096 bytes a token and layer
    assert memory.largest_batch == int((0.9 * 80e9 - memory.weight_bytes) // sequence)
    assert memory.largest_batch > 5 * memory_of(candidate(), SIZES, 16384).largest_batch


def test_a_mixture_weighs_all_of_its_experts() -> None:
    mixture = MODELS["qwen3-30b-a3b"]
    memory = memory_of(candidate(mixture), SIZES, 2048)
    routers_and_norms = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
    assert memory.weight_bytes == 2 * 30532122624 + 2 * routers_and_norms


@pytest.mark.parametrize(("precision", "bytes_a_weight"), [("int8", 1), ("w8a8", 1), ("fp8", 1)])
def test_a_byte_a_weight_and_a_scale_a_channel(precision: str, bytes_a_weight: int) -> None:
    weights = memory_of(candidate(precision=precision), SIZES, 2048).weight_bytes
    assert weights == pytest.approx(bytes_a_weight * 8030261248, rel=0.002)
    assert weights > bytes_a_weight * 8030261248


def test_four_bits_keep_the_vocabulary_in_eight() -> None:
    tables = 2 * 128256 * 4096
    expected = tables + (8030261248 - tables) * (0.5 + 2 / 32)
    assert memory_of(candidate(precision="int4"), SIZES, 2048).weight_bytes == pytest.approx(
        expected, rel=2e-3
    )


# What may never get worse ----------------------------------------------------------------------------------


def test_more_chips_of_one_engine_are_never_slower() -> None:
    rows = [one_row(candidate(mesh=mesh)) for mesh in (1, 2, 4, 8)]
    for few, many in pairwise(rows):
        assert many.prefill_seconds < few.prefill_seconds
        assert many.decode_seconds < few.decode_seconds
        assert many.memory.largest_batch > few.memory.largest_batch
        assert many.goodput > few.goodput


def test_smaller_weights_and_quicker_chips_are_never_slower() -> None:
    for better, worse in (
        (candidate(precision="int8"), candidate()),
        (candidate(precision="w8a8"), candidate(precision="int8")),
        (candidate(chip="h200"), candidate(chip="h100")),
        (candidate(acceptance=0.7), candidate()),
    ):
        quick, slow = one_row(better), one_row(worse)
        assert quick.decode_seconds <= slow.decode_seconds
        assert quick.prefill_seconds <= slow.prefill_seconds
        assert quick.goodput >= 0.98 * slow.goodput


def test_longer_work_is_slower_and_tighter_limits_allow_no_more() -> None:
    short, long = one_row(candidate()), one_row(candidate(), trace=traffic(prompt=600))
    assert long.prefill_seconds > short.prefill_seconds
    assert long.goodput < short.goodput
    rates = [one_row(candidate(), target=Target(tpot=tpot)).goodput for tpot in (inf, 0.012, 0.0075, 0.005)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0


def test_the_demand_says_how_many_engines_and_what_they_cost() -> None:
    alone = one_row(candidate(mesh=2), price=3.0)
    assert (alone.engines, alone.chips) == (1, 2)
    demanded = 3.5 * alone.goodput
    row = one_row(candidate(mesh=2), rate=demanded, price=3.0)
    assert (row.engines, row.chips, row.serves) == (4, 8, True)
    mean_output = sum(one.output_tokens for one in traffic().requests) / 48
    assert row.output_rate == pytest.approx(demanded * mean_output)
    assert row.cost_per_million == pytest.approx(8 * 3.0 / (row.output_rate * 3600 / 1e6))
    dearer = one_row(candidate(mesh=2), rate=demanded, price=6.0)
    assert dearer.cost_per_million == pytest.approx(2 * (row.cost_per_million or 0.0))
    few = one_row(candidate(mesh=2), rate=demanded, num_chips=4)
    assert (few.engines, few.serves) == (2, False)
    assert best_row([few]) is None
    assert best_row([row, dearer, few]) is row


def test_all_at_once_is_served_by_one_engine() -> None:
    row = one_row(candidate(), trace=traffic(count=8), all_at_once=True)
    assert (row.engines, row.serves) == (1, True)
    # Together they take no less than each alone, and no longer than one after the other.
    answers = sum(one.output_tokens for one in traffic(count=8).requests)
    assert answers / row.output_rate < 8 * (row.prefill_seconds + 36 * row.decode_seconds)
    assert answers / row.output_rate > row.prefill_seconds + 24 * row.decode_seconds


# The binding limit -----------------------------------------------------------------------------------------

ROUND = Chip(
    name="round",
    flops={"bfloat16": 1e15},
    memory_bytes=100e9,
    memory_bandwidth=1e12,
    link_bandwidth=0.0,
    step_overhead=1e-5,
    source="made up",
)
IDEAL = Efficiency(compute=1.0, memory=1.0)


def test_memory_binds_until_there_is_enough() -> None:
    small = replace(ROUND, memory_bytes=15e9)
    row = one_row(candidate(chip=small))
    assert (row.bound, row.serves, row.memory.largest_batch) == ("memory", False, 0)
    assert "of which the weights take 1.61e+10" in row.reason
    # Room for the weights and for about eight sequences, where sixteen could run.
    tight = replace(ROUND, memory_bytes=(16.07e9 + 0.3e9) / 0.9)
    assert one_row(candidate(chip=tight)).bound == "memory"
    assert one_row(candidate(chip=ROUND)).bound == "bandwidth"


def test_bandwidth_and_arithmetic_change_places() -> None:
    assert one_row(candidate(chip=ROUND)).bound == "bandwidth"
    slow = replace(ROUND, flops={"bfloat16": 1e13})
    assert one_row(candidate(chip=slow)).bound == "FLOPs"
    assert one_row(candidate(chip=replace(slow, memory_bandwidth=1e9))).bound == "bandwidth"


def test_the_time_per_token_binds_until_it_is_allowed() -> None:
    alone = one_row(candidate(chip=ROUND)).decode_seconds
    assert one_row(candidate(chip=ROUND), target=Target(tpot=0.5 * alone)).bound == "TPOT"
    assert one_row(candidate(chip=ROUND), target=Target(tpot=100 * alone)).bound == "bandwidth"


def test_the_first_token_binds_until_it_is_allowed() -> None:
    slow = replace(ROUND, flops={"bfloat16": 1e13})
    alone = one_row(candidate(chip=slow)).prefill_seconds
    assert one_row(candidate(chip=slow), target=Target(ttft=0.5 * alone)).bound == "TTFT"
    assert one_row(candidate(chip=slow), target=Target(ttft=1000 * alone)).bound == "FLOPs"


def test_waiting_binds_where_the_device_still_has_time() -> None:
    one_slot = replace(SIZES, num_slots=1)
    free = one_row(candidate(chip=ROUND), sizes=one_slot)
    assert free.bound == "bandwidth"
    whole_answer = free.prefill_seconds + 24 * free.decode_seconds
    row = one_row(candidate(chip=ROUND), sizes=one_slot, target=Target(ttft=1.5 * whole_answer))
    assert row.bound == "queueing"
    assert 0 < row.goodput < 0.9 * row.saturated


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rate": 0.0}, "a rate of 0 requests a second is not above 0"),
        ({"attainment": 1.5}, r"an attainment of 1\.5 is not above 0 and at most 1"),
        ({"price": -1.0}, "a price of -1 is negative"),
        ({"target": Target(ttft=0.0)}, "a ttft limit of 0 s is not above 0"),
    ],
)
def test_demands_that_cannot_be(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        one_row(candidate(), **changes)
