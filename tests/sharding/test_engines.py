"""Engines spread over eight devices answer as on one, and say no more to each other than they must."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.sharding.eight import EIGHT_DEVICES, NOT_OPTIMISED
from tests.sharding.engines import CASES, DENSE, ROWS

REPOSITORY = Path(__file__).resolve().parents[2]
SURE = 1e-3
"""A lead of the likeliest token that rounding in float32 does not take away."""
NEAR = 0.04
"""The same where keys, values and weights are eight bits: sums over devices round otherwise, and then now and
then the numbers that a row is rounded to."""
PAIRS = [(name, mesh) for name, case in CASES.items() for mesh in case.meshes]


@functools.cache
def report(name: str) -> dict[str, Any]:
    """What `tests.sharding.engines` says of one case."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.sharding.engines", name],
        cwd=REPOSITORY,
        env=os.environ | EIGHT_DEVICES | NOT_OPTIMISED,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)[name]


def read(mesh: str) -> dict[str, int]:
    """The sizes of its axes."""
    return {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_answers_are_those_of_one_device(name: str, mesh: str) -> None:
    alone, spread = report(name)["alone"], report(name)[mesh]
    sure = NEAR if name == "int8" else SURE
    for number, tokens in enumerate(alone["tokens"]):
        assert len(set(tokens)) > len(tokens) / 2
        pairs = zip(tokens, spread["tokens"][number], strict=True)
        parted = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        # The request without log-probabilities is sampled, and has no margins to allow for.
        assert parted is None or alone["margins"][number][parted] < sure


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_attention_and_feed_forward_end_in_one_sum_and_nothing_else_is_as_large(name: str, mesh: str) -> None:
    sizes = read(mesh)
    num_layers, hidden = len(CASES[name].model.layers), ROWS * DENSE.hidden_size
    found = report(name)[mesh]["collectives"]
    expected = Counter({math.prod(sizes.values()): num_layers + 1})  # The embedding is one more sum.
    if "tensor" in sizes:
        expected[sizes["tensor"]] += num_layers
    sums: Counter[int] = Counter()
    for operation, size, num_devices, times, conditional in found:
        if size == hidden:
            assert (operation, conditional) == ("all-reduce", False)
            sums[num_devices] += times
    assert sums == expected
    # Candidates for log-probabilities, counts and cuts: neither weights, nor pages, nor logits.
    assert max(size for _, size, *_ in found if size != hidden) < hidden < ROWS * DENSE.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_a_device_holds_its_part_of_every_matrix(name: str, mesh: str) -> None:
    sizes = read(mesh)
    tensor, every = 1 / sizes.get("tensor", 1), 1 / sizes.get("tensor", 1) / sizes.get("expert", 1)
    for path, share in report(name)[mesh]["shares"].items():
        if "norm" in path or "router" in path or "down'].scales" in path or "o'].scales" in path:
            assert share in (1, every, tensor), path  # Small; scales of groups are cut, of channels not.
        else:
            assert share == (tensor if "qkv" in path or "['o']" in path else every), path
