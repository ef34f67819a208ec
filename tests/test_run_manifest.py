"""One file of all that can change an answer or its speed: its hash is stable, and drift is told by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.run_manifest import RunManifest, read_policy_or_manifest
from jaxserve.scheduling import SchedulerPolicy
from jaxserve.scheduling.classes import PriorityClass, RetryBudget, TenantPolicy

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.dictionaries(st.text().filter(lambda name: name not in ("hash", "jaxserve_manifest")), VALUES)
MANIFEST = RunManifest({"engine": {"num_slots": 4, "rows": [1, 4]}, "versions": {"jax": "1"}})


def policy_manifest(policy: SchedulerPolicy, folder: Path) -> Path:
    """The file of a manifest that has this policy."""
    path = folder / "run.json"
    RunManifest({}).extended("scheduler", {"policy": policy}).write(path)
    return path


@given(ENTRIES)
@settings(max_examples=30)
def test_a_file_says_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("manifest") / "run.json"
    manifest = RunManifest(entries)
    manifest.write(path)
    assert RunManifest.read(path) == manifest
    assert json.loads(path.read_text())["hash"] == manifest.digest
    backwards = RunManifest(dict(reversed(entries.items())))
    assert backwards.digest == manifest.digest
    assert manifest.drift(backwards) == []


@given(ENTRIES, ENTRIES)
@settings(max_examples=30)
def test_the_hash_differs_where_something_drifted(one: dict[str, Any], other: dict[str, Any]) -> None:
    before, after = RunManifest(one), RunManifest(other)
    if before.drift(after):
        assert before.digest != after.digest
    assert bool(before.drift(after)) == bool(after.drift(before))


def test_drift_names_each_thing_its_value_and_the_former_one() -> None:
    now = RunManifest({"engine": {"num_slots": 8, "rows": [1, 8]}, "machine": {"platform": "tpu"}})
    assert MANIFEST.drift(now) == [
        "engine.num_slots is 8 and was 4",
        "engine.rows is [1, 8] and was [1, 4]",
        'machine.platform is "tpu" and was absent',
        'versions.jax is absent and was "1"',
    ]
    assert MANIFEST.drift(now, ["machine"]) == ['machine.platform is "tpu" and was absent']
    assert MANIFEST.drift(now, []) == []


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text.replace('"num_slots": 4', '"num_slots": 5'), "was changed since it was written"),
        (lambda text: text.replace('"hash"', '"hush"'), "was changed since it was written"),
        (lambda text: text.replace('"jaxserve_manifest": 1', '"jaxserve_manifest": 2'), "has format 2"),
        (lambda text: text.replace("jaxserve_manifest", "x"), "is no manifest"),
        (lambda text: "[]", "is no manifest"),
        (lambda text: text[:20], "run.json: "),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[str], str], complaint: str) -> None:
    path = tmp_path / "run.json"
    MANIFEST.write(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=complaint):
        RunManifest.read(path)


POLICY = SchedulerPolicy(
    classes=(PriorityClass(name="only", ttft_target=0.5, max_waiting=7),),
    tenants={"one": TenantPolicy(weight=3.0, tokens_per_second=100.0)},
    other_tenants=TenantPolicy(max_open=5),
    retries=RetryBudget(ratio=0.5),
    max_waiting=20,
)


@pytest.mark.parametrize("policy", [SchedulerPolicy(), SchedulerPolicy.first_come(), POLICY])
def test_a_manifest_stands_for_its_policy(tmp_path: Path, policy: SchedulerPolicy) -> None:
    path = policy_manifest(policy, tmp_path)
    found, manifest = read_policy_or_manifest(path)
    assert found == policy
    assert manifest == RunManifest.read(path)


def test_a_policy_file_is_no_manifest(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text('{"max_waiting": 3}')
    assert read_policy_or_manifest(path) == (SchedulerPolicy(max_waiting=3), None)
    (tmp_path / "policy.toml").write_text("max_waiting = 3\n")
    assert read_policy_or_manifest(tmp_path / "policy.toml") == (SchedulerPolicy(max_waiting=3), None)


def test_a_manifest_without_a_valid_policy_is_refused(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"none\.json: the manifest has no scheduler policy"):
        read_policy_or_manifest(tmp_path / "none.json")
    path = policy_manifest(SchedulerPolicy(), tmp_path)
    entries = dict(RunManifest.read(path).entries)
    entries["scheduler"]["policy"]["max_passed"] = -1
    RunManifest(entries).write(path)
    with pytest.raises(ValueError, match="max_passed -1 is out of range"):
        read_policy_or_manifest(path)


def test_infinities_are_written_as_json(tmp_path: Path) -> None:
    path = policy_manifest(POLICY, tmp_path)
    assert "Infinity" not in path.read_text()
    assert read_policy_or_manifest(path)[0].classes[0].tpot_target == math.inf
    other = replace(POLICY, max_waiting=21)
    drift = RunManifest.read(path).drift(RunManifest.read(policy_manifest(other, tmp_path)))
    assert drift == ["scheduler.policy.max_waiting is 21 and was 20"]
