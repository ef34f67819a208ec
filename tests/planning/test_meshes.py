"""Meshes of any axes: memory as the engine has it, exchanges as compilers make them, and what must hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.engine.build import resolve_config
from jaxserve.engine.memory import weight_bytes
from jaxserve.engine.mesh import divides, num_pools
from jaxserve.engine.options import EngineOptions
from jaxserve.plan import StepShape
from jaxserve.planning import MODELS, Chip, CostModel, Efficiency, Footprint, find_chip
from jaxserve.planning.cost_model import ALL_REDUCE_LATENCY
from jaxserve.planning.meshes import ChipMesh, meshes_of
from jaxserve.planning.plan_records import Candidate, Demand, Row, Sizes
from jaxserve.planning.planner import make_engine, memory_of, plan, shortlist
from jaxserve.planning.precision import find_precision
from jaxserve.planning.workload import Lengths, Workload
from jaxserve.quantization import recipe_named

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "compile-large-models.json"
SIZES = Sizes(num_slots=32, max_chunk=512, max_model_len=2048)
ROUND = Chip(
    name="round",
    flops={"bfloat16": 1e15},
    memory_bytes=400e9,
    memory_bandwidth=1e12,
    link_bandwidth=1e11,
    step_overhead=1e-4,
    source="made up",
)
LLAMA = MODELS["llama-3.1-8b"]
MIXTRAL = replace(MODELS["mixtral-8x22b"], layers=MODELS["mixtral-8x22b"].layers[:9])
WINDOWS = replace(LLAMA, layers=(LayerKind(window=512), LayerKind()) * 7, num_kv_heads=2)
ALL = {"dense": LLAMA, "experts": MIXTRAL, "windows and few heads": WINDOWS}
EIGHT = {name: [mesh for mesh in meshes_of(8) if divides(model, mesh.axes)] for name, model in ALL.items()}
CASES = [(name, mesh) for name, meshes in EIGHT.items() for mesh in meshes]


def ids(value: Any) -> str | None:
    return value.name if isinstance(value, ChipMesh) else None


def candidate(
    mesh: ChipMesh, model: ModelConfig = LLAMA, chip: Chip = ROUND, precision: str = "bfloat16"
) -> Candidate:
    cost = CostModel(Footprint.of(model), chip, mesh=mesh)
    return Candidate(precision=find_precision(precision), cost=cost, others="bfloat16")


def demand(num_requests: int = 48) -> Demand:
    workload = Workload(prompt=Lengths(mean=200, p95=300), output=Lengths(mean=24, p95=36))
    return Demand(trace=workload.trace(num_requests, longest=2048), rate=None, all_at_once=True)


def row(mesh: ChipMesh, times: int = 1) -> Row:
    """Of an engine with so many times the slots and the requests."""
    sizes = replace(SIZES, num_slots=times * SIZES.num_slots)
    (found,) = plan([candidate(mesh)], demand(times * 48), sizes)
    return found


def test_meshes_have_names_and_all_factors() -> None:
    assert ChipMesh(tensor=4, pipe=2).name == "tensor=4,pipe=2"
    assert ChipMesh().name == "tensor=1"
    assert ChipMesh(data=2, expert=2).axes == (("data", 2), ("expert", 2))
    found = list(meshes_of(8))
    assert found[0] == ChipMesh(tensor=8)
    assert len(set(found)) == len(found) == math.comb(3 + 3, 3)
    assert {mesh.size for mesh in found} == {8}
    with pytest.raises(ValueError, match="has an axis below 1"):
        ChipMesh(tensor=0)


# Memory, against the engine's ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=ids)
def test_a_chip_has_the_weights_that_a_device_has(name: str, mesh: ChipMesh) -> None:
    planned = find_precision("bfloat16").stored_bytes(ALL[name], "bfloat16", mesh)
    assert planned == weight_bytes(ALL[name], "bfloat16", "stacked", None, mesh.axes)


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("mesh", [ChipMesh(tensor=8), ChipMesh(tensor=2, pipe=2, data=2)], ids=ids)
def test_scales_are_counted_nearly(mesh: ChipMesh, recipe: str) -> None:
    model = replace(LLAMA, layers=LLAMA.layers[:8])
    planned = find_precision(recipe).stored_bytes(model, "bfloat16", mesh)
    held = weight_bytes(model, "bfloat16", "stacked", recipe_named(recipe), mesh.axes)
    assert planned == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=ids)
def test_a_chip_has_the_pages_that_a_device_has(name: str, mesh: ChipMesh) -> None:
    model, cost = ALL[name], candidate(mesh, ALL[name]).cost
    # So little memory that all of it is pages, in the proportions of the groups.
    budget = 2**30
    options = EngineOptions(kv_memory=budget * num_pools(mesh.axes), num_slots=2048)
    config = resolve_config(model, options, "tpu", "bfloat16", 8192, mesh.axes)
    planned = sum(
        pages * cost.stage.page_bytes("bfloat16", 64, window) / cost.kv_shards
        for pages, window in zip(config.cache.num_pages, model.windows, strict=True)
    )
    assert planned == pytest.approx(budget, rel=0.02)
    assert planned <= budget


# Exchanges, against what compilers made --------------------------------------------------------------------


@pytest.mark.parametrize("number", range(6))
def test_exchanges_are_those_of_compiled_programs(number: int) -> None:
    run = json.loads(RESULTS.read_text())["runs"][number]
    axes = {axis: int(size) for axis, size in (part.split("=") for part in run["mesh"].split(","))}
    mesh = ChipMesh(**axes)
    cost = CostModel(Footprint.of(MODELS[run["model"]]), find_chip("v5e"), mesh=mesh)
    for step in run["steps"]:
        shape = StepShape(**step["shape"])
        # A program of groups in turn has the rows of one of them; a step of the planner's is as many.
        programs = mesh.pipe if shape.decode else 1
        all_rows = replace(shape, rows=shape.rows * programs, logit_rows=shape.logit_rows * programs)
        exchanges = cost.exchanges(all_rows)
        # A reduce-scatter over two of rows that no tile divides has an exchange of its own for the rest.
        rests = run["num_layers"] if run["mesh"] == "data=2,tensor=2" and not shape.decode else 0
        assert exchanges.number / programs + rests == pytest.approx(step["num_exchanges"], rel=0.15)
        assert exchanges.sent_bytes / programs == pytest.approx(
            step["sent_bytes"], rel=0.025 if rests else 0.01
        )


def test_replicas_that_share_experts_send_each_other_their_rows() -> None:
    def exchanges(mesh: ChipMesh) -> Any:
        return candidate(mesh, MIXTRAL).cost.exchanges(StepShape(32, 32, 32, decode=True))

    # In each of nine layers rows of 6,144 numbers go to three others and their sums come back; of each of two
    # experts that a row has chosen, its number and its weight.
    assert exchanges(ChipMesh(data=4)) == (3 * 9, 9 * 3 * 32 * (2 * 6144 * 2 + 2 * 8))
    # Three do not divide eight experts: each has all.
    assert exchanges(ChipMesh(data=3)) == (0, 0)


# A step in stages by hand ----------------------------------------------------------------------------------


def test_groups_in_turn_read_a_stage_in_each_tick() -> None:
    ideal = Efficiency(compute=1.0, memory=1.0)
    footprint = Footprint.of(LLAMA)

    def cost(in_turn: bool) -> Any:
        model = CostModel(footprint, ROUND, mesh=ChipMesh(pipe=4), in_turn=in_turn, efficiency=ideal)
        shape = StepShape(32, 32, 32, decode=True)
        return model.cost(shape, np.full(32, 1023), np.ones(32, np.int64))

    ticks, through_all = cost(in_turn=True), cost(in_turn=False)
    # Four ticks of eight of the 32 layers each, or one step through all of them.
    assert ticks.matrices == through_all.matrices == pytest.approx(2 * footprint.dense_weights / 1e12)
    # All stages read pages at the same time, or one after the other: contexts of 16 pages, and a row written.
    tokens = 32 * (1024 + 1)
    assert through_all.attention == pytest.approx(tokens * footprint.kv_token_bytes("bfloat16") / 1e12)
    assert ticks.attention == pytest.approx(through_all.attention / 4)
    # The head is cut four ways, and read in each tick.
    table, logits = 2 * footprint.head_weights, 2 * 4 * 128256
    assert ticks.head == pytest.approx(4 * (table + 8 * logits) / 4 / 1e12)
    assert through_all.head == pytest.approx((table + 32 * logits) / 4 / 1e12)
    assert (ticks.overhead, through_all.overhead) == (pytest.approx(4e-4), pytest.approx(1e-4))
    # In each tick 8 rows are summed after the embedding, handed on, and come from the last stage.
    sent = 8 * 4096 * 2 * (1 + 2 * 2 * 3 / 4) / 1e11
    assert ticks.collectives == pytest.approx(4 * (3 * ALL_REDUCE_LATENCY + sent))


def test_a_prompt_waits_for_stages_at_both_ends() -> None:
    shape, contents = StepShape(2048, 1, 1), (np.zeros(1, np.int64), np.full(1, 2048))
    slow = replace(ROUND, flops={"bfloat16": 1e13})
    alone, staged = (
        candidate(mesh, chip=slow).cost.cost(shape, *contents) for mesh in (ChipMesh(), ChipMesh(pipe=2))
    )
    # Four parts, of which each stage has half of the layers in five ticks.
    assert staged.matrices / alone.matrices == pytest.approx(5 / 8, rel=0.01)
    assert staged.attention / alone.attention == pytest.approx(5 / 8)


# What must hold --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["tensor", "pipe", "expert", "data"])
@pytest.mark.parametrize("name", ALL)
def test_more_chips_never_hold_less(name: str, axis: str) -> None:
    sizes = [1, 2, 4, 8]
    meshes = [mesh for mesh in (ChipMesh(**{axis: size}) for size in sizes) if divides(ALL[name], mesh.axes)]
    found = [memory_of(candidate(mesh, ALL[name]), SIZES, 2048) for mesh in meshes]
    batches = [memory.largest_batch for memory in found]
    weights = [memory.weight_bytes for memory in found]
    assert batches == sorted(batches)
    assert weights == sorted(weights, reverse=True)
    if axis == "data" and name != "experts":  # Which replicas share out.
        assert weights[-1] == weights[0]
        assert batches == [mesh.data * batches[0] for mesh in meshes]
    elif len(meshes) > 1:
        assert batches[-1] > batches[0]


def test_replicas_serve_as_much_as_engines_and_no_single_one_sooner() -> None:
    alone, two = row(ChipMesh()), row(ChipMesh(data=2), times=2)
    assert two.mesh == 2
    assert two.decode_seconds == pytest.approx(alone.decode_seconds)
    assert two.prefill_seconds == pytest.approx(alone.prefill_seconds, rel=0.01)
    assert two.saturated == pytest.approx(2 * alone.saturated, rel=0.15)
    # A chip that has half of everything is sooner done with one of them.
    assert row(ChipMesh(tensor=2)).decode_seconds < 0.7 * two.decode_seconds


def test_stages_are_no_sooner_done_with_one_sequence() -> None:
    alone, staged = row(ChipMesh()), row(ChipMesh(pipe=4))
    assert staged.decode_seconds > alone.decode_seconds
    # Each tick reads the part of its stage: with many at once no less is read than by one chip.
    assert staged.batch_decode_seconds == pytest.approx(alone.batch_decode_seconds, rel=0.2)
    assert staged.memory.largest_batch > 4 * alone.memory.largest_batch


def test_the_shortlist_has_what_is_best_in_something() -> None:
    def kept(model: ModelConfig, chip: Chip, sizes: Sizes = SIZES) -> list[str]:
        candidates = [candidate(mesh, model, chip) for mesh in meshes_of(4) if divides(model, mesh.axes)]
        return [one.cost.mesh.name for one in shortlist(candidates, demand(), sizes)]

    # Few at once are bound by reading weights, of which the chips of `tensor` each read a part.
    assert kept(LLAMA, ROUND) == ["tensor=4"]
    # Where links are slow, replicas, which exchange nothing, bring more at once, and `tensor` one sooner.
    slow = replace(ROUND, link_bandwidth=1e9)
    assert kept(LLAMA, slow, replace(SIZES, num_slots=1024))[-1] == "data=4"
    assert kept(LLAMA, replace(ROUND, memory_bytes=1e9)) == []


def test_slots_that_replicas_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="32 slots are not divided by the 3 replicas of data=3"):
        make_engine(candidate(ChipMesh(data=3)), SIZES)
