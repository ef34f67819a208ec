"""Prompts computed on other devices than answers: the answers are those of one device, or it is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from jaxserve.engine.options import EngineOptions
from jaxserve.engine.prefill import check_prefill
from sharding import parse_mesh
from tests.sharding.eight import report_of
from tests.sharding.engines import DENSE
from tests.sharding.margins import NEAR, SURE, parting
from tests.sharding.prefill import PAIRS

CASES = [(name, " ".join(map(str, pair))) for name, pairs in PAIRS.items() for pair in pairs]


@functools.cache
def report(name: str) -> dict[str, Any]:
    """What `tests.sharding.prefill` says of one case."""
    return report_of("tests.sharding.prefill", name)[name]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "meshes"), CASES)
def test_answers_are_those_of_one_device(name: str, meshes: str) -> None:
    alone, apart = report(name)["alone"], report(name)[meshes]
    sure = NEAR if name == "int8" else SURE
    for number, tokens in enumerate(alone["tokens"]):
        parted = parting(tokens, apart["tokens"][number])
        # Those without log-probabilities are sampled, and have no margins to allow for.
        assert parted is None or alone["margins"][number][parted] < sure
    assert apart["prompts"] >= 4
    assert apart["pages"] >= 7
    assert apart["cached"] > 0


@pytest.mark.slow
def test_requests_gave_way_to_others() -> None:
    assert report("windowed")["tensor=2 tensor=4"]["preemptions"] > 0


@pytest.mark.parametrize(
    ("mesh", "prefill_mesh", "own", "message"),
    [
        (
            "tensor=4",
            "tensor=8",
            {},
            "prefill_mesh tensor=8 takes 8 devices beside the 4 of mesh tensor=4, and ",
        ),
        ("data=2", "tensor=2", {}, "mesh data=2: prompts are computed apart without mesh axis 'data', not 2"),
        (
            "tensor=2",
            "data=4",
            {},
            "prefill_mesh data=4: prompts are computed apart without mesh axis 'data'",
        ),
        (
            "tensor=2",
            "pipe=2",
            {},
            "prefill_mesh pipe=2 has 2 stages of mesh axis 'pipe' and mesh tensor=2 has 1",
        ),
        (
            "tensor=2",
            "tensor=3",
            {},
            "prefill_mesh tensor=3: kv_heads has size 8, .* nearest to it are tensor=2 or",
        ),
        ("auto", "tensor=2", {}, "prefill_mesh tensor=2 with mesh auto: name the axes of both"),
        (
            "tensor=2",
            "tensor=2",
            {"host_kv_memory": 2**20},
            "with host_kv_memory 1048576: one of them at a time",
        ),
        (
            "tensor=1",
            "tensor=2",
            {"speculative": "draft:small"},
            "'draft:small': a draft model runs on one device",
        ),
        (
            "tensor=2",
            "tensor=4",
            {"deterministic": True},
            "with deterministic and mesh tensor=2: sums over other",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    mesh: str, prefill_mesh: str, own: dict[str, Any], message: str
) -> None:
    options = EngineOptions(mesh=mesh, prefill_mesh=prefill_mesh, **own)
    axes = () if mesh == "auto" else parse_mesh(mesh)
    with pytest.raises(ValueError, match=message):
        check_prefill(options, axes, DENSE, 8, "cpu")


def test_several_processes_and_a_mesh_without_a_name_are_refused() -> None:
    options = EngineOptions(mesh="tensor=2", prefill_mesh="tensor=2")
    with pytest.raises(ValueError, match="prefill_mesh tensor=2 with 2 processes: it works in a single one"):
        check_prefill(options, parse_mesh("tensor=2"), DENSE, 8, "cpu", 2)
    with pytest.raises(ValueError, match="prefill_mesh auto: name its axes, as in tensor=2"):
        EngineOptions(prefill_mesh="auto")
    with pytest.raises(ValueError, match="mesh 'tensor': expected auto, or tensor=N"):
        EngineOptions(prefill_mesh="tensor")
