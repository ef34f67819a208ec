"""The policy: its defaults, how it is read, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.scheduling.classes import PriorityClass, RetryBudget, SchedulerPolicy, TenantPolicy
from jaxserve.scheduling.terms import ServiceTerms


def test_the_defaults_go_from_urgent_to_patient() -> None:
    classes = SchedulerPolicy().classes
    assert [one.name for one in classes] == ["interactive", "default", "retry", "batch"]
    assert [one.rank for one in classes] == [0, 1, 2, 3]
    waits = [one.max_wait for one in classes]
    assert waits == sorted(waits)
    assert sum(one.reserved for one in classes) < 1


@pytest.mark.parametrize(
    ("priority", "is_retry", "served_as"),
    [
        ("interactive", False, "interactive"),
        ("interactive", True, "retry"),
        ("default", True, "retry"),
        ("batch", True, "batch"),
        ("retry", False, "retry"),
    ],
)
def test_a_retry_never_gains_by_being_one(priority: str, is_retry: bool, served_as: str) -> None:
    terms = ServiceTerms(priority=priority, is_retry=is_retry)
    assert SchedulerPolicy().priority_class(terms).name == served_as


def test_an_unknown_priority_is_named() -> None:
    with pytest.raises(ValueError, match="priority 'urgent' is not a class; there are interactive, default"):
        SchedulerPolicy().class_index(ServiceTerms(priority="urgent"))


def test_without_a_retry_class_a_retry_keeps_its_own() -> None:
    policy = SchedulerPolicy(classes=(PriorityClass(name="only"),))
    assert policy.class_index(ServiceTerms(priority="only", is_retry=True)) == 0


SETTINGS: dict[str, Any] = {
    "max_waiting": 99,
    "output_weight": 3,
    "classes": {"interactive": {"share": 16, "max_wait": 2.5}, "nightly": {"rank": 9, "share": 0.5}},
    "tenants": {"acme": {"weight": 4, "max_open": 10}},
    "other_tenants": {"tokens_per_second": 1000},
    "retries": {"ratio": 0.1},
}
TOML = """
max_waiting = 99
output_weight = 3
[classes.interactive]
share = 16
max_wait = 2.5
[classes.nightly]
rank = 9
share = 0.5
[tenants.acme]
weight = 4
max_open = 10
[other_tenants]
tokens_per_second = 1000
[retries]
ratio = 0.1
"""


def test_a_policy_is_read_alike_from_a_mapping_toml_and_json(tmp_path: Path) -> None:
    policy = SchedulerPolicy.from_mapping(SETTINGS)
    (tmp_path / "policy.toml").write_text(TOML)
    (tmp_path / "policy.json").write_text(json.dumps(SETTINGS))
    assert SchedulerPolicy.read(tmp_path / "policy.toml") == policy
    assert SchedulerPolicy.read(tmp_path / "policy.json") == policy

    default = SchedulerPolicy()
    assert policy.classes[0] == replace(default.classes[0], share=16, max_wait=2.5)
    assert policy.classes[1:4] == default.classes[1:]
    assert policy.classes[4] == PriorityClass(name="nightly", rank=9, share=0.5)
    assert policy.tenant("acme") == TenantPolicy(weight=4, max_open=10)
    assert policy.tenant("anybody") == TenantPolicy(tokens_per_second=1000)
    assert policy.retries == RetryBudget(ratio=0.1)
    assert (policy.max_waiting, policy.output_weight, policy.order) == (99, 3, "fair")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sizes": 1}, "sizes is not a setting; there are classes, "),
        ({"order": "random"}, "order 'random' is not known; there are fair, fcfs, longest-prefix"),
        ({"max_waiting": -1}, "max_waiting -1 is out of range: it must be from 0 to"),
        ({"max_waiting": 1.5}, "max_waiting 1.5 is not a whole number"),
        ({"prompt_weight": "much"}, "prompt_weight 'much' is not a number"),
        ({"prompt_weight": float("nan")}, "prompt_weight nan is out of range"),
        ({"prompt_weight": True}, "prompt_weight True is not a number"),
        ({"classes": 3}, "classes 3 is not a table of settings"),
        ({"classes": {"batch": 3}}, "classes.batch 3 is not a table of settings"),
        ({"classes": {"batch": {"wieght": 3}}}, "classes.batch.wieght is not a setting; there are expected_"),
        ({"classes": {"batch": {"name": "x"}}}, "classes.batch.name is not a setting"),
        (
            {"classes": {"batch": {"share": 0}}},
            "classes.batch.share 0 is out of range: it must be from 0.001",
        ),
        ({"classes": {"batch": {"reserved": 1.5}}}, "classes.batch.reserved 1.5 is out of range"),
        (
            {"classes": {"batch": {"reserved": 0.625}}},
            "the classes reserve 1.0 of the slots; the limit is bel",
        ),
        ({"classes": {"": {}}}, "the name of a class is empty"),
        ({"tenants": {"acme": {"max_open": -2}}}, "tenants.acme.max_open -2 is out of range"),
        ({"other_tenants": {"burst": 0}}, "other_tenants.burst 0 is out of range"),
        ({"retries": {"ratio": 2}}, "retries.ratio 2 is out of range: it must be from 0.0 to 1.0"),
    ],
)
def test_a_bad_setting_is_named_with_value_and_limit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        SchedulerPolicy.from_mapping(settings)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    for name, text, message in [
        ("a.yaml", "", "a policy is a .toml or .json file"),
        ("a.toml", "classes = ", "a.toml: "),
        ("a.json", "[1]", "the policy .* is not a table"),
        ("b.json", '{"max_waiting": -1}', "b.json: max_waiting -1"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            SchedulerPolicy.read(tmp_path / name)


def test_no_policy_without_classes_or_with_twins() -> None:
    with pytest.raises(ValueError, match="classes is empty"):
        SchedulerPolicy(classes=())
    with pytest.raises(ValueError, match="two classes share a name"):
        SchedulerPolicy(classes=(PriorityClass(name="a"), PriorityClass(name="a")))
