"""Replicas: what they answer, what is refused, and which part of what the host says each of them hears."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.config import EngineConfig, LayerKind
from jaxserve.engine.build import resolve_config
from jaxserve.engine.options import EngineOptions
from jaxserve.plan import PageGrant, SequencePlan, StepPlan, StepShape
from jaxserve.replica_plans import split_plan
from sharding import parse_mesh
from tests.sharding.eight import report_of
from tests.sharding.replicas import ONLY
from tests.sharding.test_mesh import DENSE


@pytest.mark.slow
def test_drafts_iterations_samples_and_masks_are_as_on_one_device() -> None:
    report = report_of("tests.sharding.replicas", "data=2")
    alone, spread = report["alone"], report["data=2"]
    assert spread["masked"] == alone["masked"] == list(ONLY)
    assert spread["plain"] == alone["plain"]
    assert spread["drafted"]["tokens"] == alone["drafted"]["tokens"] == alone["plain"]["tokens"]
    assert spread["drafted"]["accepted"] > 10


def test_a_plan_is_told_to_each_replica_in_its_own_numbers() -> None:
    plan = StepPlan.of(
        [SequencePlan(1, 3), SequencePlan(0, 1), SequencePlan(7, 2, 2), SequencePlan(6, 1)],
        [PageGrant(0, 7, 2, 5), PageGrant(0, 1, 0, 5)],
        StepShape(16, 4, 4),
    )
    plan = dataclasses.replace(plan, drafts=np.array([-1, -1, -1, 9, -1], np.int32))
    first, second, third, last = split_plan(plan, 4, 2)
    assert first.sequences == [SequencePlan(1, 3), SequencePlan(0, 1)]
    assert first.page_grants == [PageGrant(0, 1, 0, 5)]
    assert (len(second.slots), len(third.slots), len(third.grants)) == (0, 0, 0)
    assert last.sequences == [SequencePlan(1, 2, 2), SequencePlan(0, 1)]
    assert last.page_grants == [PageGrant(0, 1, 2, 5)]
    assert [part.drafts.tolist() for part in (first, last) if part.drafts is not None] == [
        [-1, -1],
        [-1, 9, -1],
    ]
    with pytest.raises(ValueError, match=r"slots \[1, 0, 7, 6\] are not in the order of replicas of 1 slots"):
        split_plan(plan, 8, 1)


@pytest.mark.parametrize(
    ("mesh", "num_slots", "message"),
    [
        (
            "data=3",
            8,
            "mesh data=3: num_slots has size 8, which the 3 replicas of mesh axis 'data' do not divide; "
            "nearest to it are data=2 or data=4, or num_slots 9",
        ),
        ("data=2,tensor=2", 1, "num_slots has size 1, .* nearest to it are tensor=2, or num_slots 2"),
    ],
)
def test_slots_that_replicas_do_not_divide_are_refused(mesh: str, num_slots: int, message: str) -> None:
    options = EngineOptions(num_slots=num_slots, kv_memory=10**7)
    with pytest.raises(ValueError, match=message):
        resolve_config(DENSE, options, "cpu", "float32", 128, parse_mesh(mesh))


def test_host_memory_for_pages_is_refused() -> None:
    options = EngineOptions(host_kv_memory=2**20, kv_memory=10**7)
    with pytest.raises(ValueError, match="host_kv_memory on mesh data=2: it works without 'data'"):
        resolve_config(DENSE, options, "cpu", "float32", 128, parse_mesh("data=2"))


def test_slots_and_memory_are_shared_out_and_pages_are_each_replicas_own() -> None:
    model = dataclasses.replace(DENSE, layers=(LayerKind(window=12), LayerKind()))

    def resolved(mesh: str, **settings: int) -> EngineConfig:
        return resolve_config(
            model,
            EngineOptions(**settings),
            "tpu",
            "bfloat16",
            256,
            parse_mesh(mesh),  # type: ignore[arg-type]
        )

    one, two = resolved("tensor=2", kv_memory=2**20), resolved("data=2,tensor=2", kv_memory=2**21)
    assert two.cache.num_pages == one.cache.num_pages
    assert (one.num_slots, two.num_slots, two.num_replicas) == (64, 64, 2)
    two = resolved("data=2", num_slots=16, num_pages=7)
    assert (two.num_slots, two.cache.num_pages, two.decode_rows[-1]) == (8, (7, 7), 8)
