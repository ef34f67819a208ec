"""Engines spread over eight devices answer as on one, and say no more to each other than they must."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import pytest

from jaxserve.model.stages import stages_of
from tests.sharding.eight import report_of
from tests.sharding.engines import CASES, DENSE, ROWS
from tests.sharding.margins import NEAR, SURE, parting

PAIRS = [(name, mesh) for name, case in CASES.items() for mesh in case.meshes]


@functools.cache
def report(name: str) -> dict[str, Any]:
    """What `tests.sharding.engines` says of one case."""
    return report_of("tests.sharding.engines", name)[name]


def read(mesh: str) -> dict[str, int]:
    """The sizes of its axes."""
    return {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_answers_are_those_of_one_device(name: str, mesh: str) -> None:
    alone, spread = report(name)["alone"], report(name)[mesh]
    sure = NEAR if name == "int8" else SURE
    for number, tokens in enumerate(alone["tokens"]):
        assert len(set(tokens)) >= len(tokens) / 2
        parted = parting(tokens, spread["tokens"][number])
        # The request without log-probabilities is sampled, and has no margins to allow for.
        assert parted is None or alone["margins"][number][parted] < sure


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_parts_of_a_layer_end_in_one_sum_and_nothing_else_is_as_large(name: str, mesh: str) -> None:
    sizes = read(mesh)
    replicas, stages = sizes.pop("data", 1), sizes.pop("pipe", 1)
    # A step is one tick, in which every stage takes another group through its layers, or as many as there are
    # stages, through which all go.
    num_groups = CASES[name].settings.get("decode_groups", stages)
    num_ticks = stages // num_groups
    hidden = ROWS // replicas // num_groups * DENSE.hidden_size
    num_layers = num_ticks * stages_of(CASES[name].model, stages).model.num_layers
    every = stages * math.prod(sizes.values())
    expected = Counter({every: 1} if every > 1 else {})  # The embedding.
    for axes in (sizes.values(), [sizes.get("tensor", 1)]):
        if math.prod(axes) > 1:
            expected[math.prod(axes)] += num_layers
    if stages > 1:
        expected[stages] += 1  # What the last has, to all.
    sums: Counter[int] = Counter()
    num_moves = 0
    found = list(report(name)[mesh]["collectives"])
    if replicas > 1 and (layers := num_ticks * _num_expert_layers(name, stages)):
        # Each replica's rows and what they have chosen go to the experts of all, and come back as one sum.
        rows, chosen = replicas * hidden, 2 * CASES[name].model.experts_per_token
        for exchange in (
            ["all-gather", rows, replicas, layers, False],
            ["all-gather", rows // DENSE.hidden_size * chosen, replicas, layers, False],
            ["reduce-scatter", hidden, replicas, layers, False],
        ):
            found.remove(exchange)
    for operation, size, num_devices, times, conditional in found:
        if size == hidden:
            assert operation in ("all-reduce", "collective-permute")
            assert not conditional
            if operation == "all-reduce":
                sums[num_devices] += times
            else:
                num_moves += times
    assert sums == expected
    assert num_moves == (stages > 1 if num_ticks == 1 else stages - 1)
    # Candidates for log-probabilities, counts and cuts: neither weights, nor pages, nor logits.
    others = [size for _, size, *_ in found if size != hidden]
    assert max(others, default=0) < hidden < ROWS * DENSE.vocab_size
    # Replicas say nothing to each other at all: where they do, it is as many devices as there are replicas.
    assert replicas not in {num_devices for _, _, num_devices, *_ in found} | set(sizes.values())
    assert bool(found) == (every > 1)


def _num_expert_layers(name: str, stages: int) -> int:
    """Of one stage."""
    return sum(kind.experts for kind in stages_of(CASES[name].model, stages).model.layers)


@pytest.mark.slow
def test_requests_gave_way_to_others_in_a_pipeline() -> None:
    assert report("stages of experts")["tensor=2,expert=2,pipe=2"]["preemptions"] > 0


@pytest.mark.slow
def test_requests_gave_way_to_others_of_their_replica() -> None:
    assert report("replicas of windows")["data=2,tensor=4"]["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_a_device_holds_its_part_of_every_matrix(name: str, mesh: str) -> None:
    sizes = read(mesh)
    tensor, every = 1 / sizes.get("tensor", 1), 1 / sizes.get("tensor", 1) / sizes.get("expert", 1)
    for path, held in report(name)[mesh]["shares"].items():
        # Of a stage's part of the layers and of the vocabulary; the final norm is everywhere.
        share = held * (1 if "final_norm" in path else sizes.get("pipe", 1))
        if "expert_" in path:
            share *= sizes.get("data", 1)
        if "norm" in path or "router" in path or "down'].scales" in path or "o'].scales" in path:
            assert share in (1, every, tensor), path  # Small; scales of groups are cut, of channels not.
        else:
            assert share == (tensor if "qkv" in path or "['o']" in path else every), path
