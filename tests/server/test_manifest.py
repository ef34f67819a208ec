"""A server that writes its manifest, and one that is held to it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jaxserve.engine.options import EngineOptions
from jaxserve.machine import processor
from jaxserve.opened_model import OpenedModel, open_model
from jaxserve.run_manifest import RunManifest
from server.core import Service
from server.core.statistics import StatisticsOptions
from server.loading import ModelLoader
from server.route_arguments import RouteArguments

SETTINGS = {"num_slots": 2, "max_model_len": 64, "max_chunk": 16, "num_pages": 20}


def load(model: Path, manifest_file: Path | None = None, **route: object) -> Service:
    """The service of a small engine, which is closed; its identity stays."""
    arguments: dict[str, object] = {"name": "stories", "generation_config": "auto", "settings": SETTINGS}
    declared = RouteArguments(model=str(model), **arguments | route)  # type: ignore[arg-type]
    loader = ModelLoader([declared], StatisticsOptions(), progress=False, manifest_file=manifest_file)
    (service,) = loader
    service.engine.close()
    assert f"manifest  {service.identity.manifest}" in loader.lines
    return service


@pytest.fixture(scope="module")
def model(shared_data: Path) -> Path:
    return shared_data / "models" / "stories260K" / "hf"


@pytest.fixture(scope="module")
def frozen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server has written."""
    path = tmp_path_factory.mktemp("frozen") / "run.json"
    service = load(model, path)
    assert service.identity.manifest == RunManifest.read(path).digest
    return path


def test_the_manifest_names_the_kernels_and_what_computes(frozen: Path) -> None:
    entries = RunManifest.read(frozen).entries
    assert "ragged_paged_attention" in entries["kernels"]
    assert entries["machine"]["platform"] == "cpu"
    assert {"jaxserve", "jax", "jaxlib"} <= entries["versions"].keys()
    assert entries["engine"]["num_slots"] == 2


def test_the_manifest_counts_the_cores_that_this_process_may_use(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    opened, options = open_model(str(model)), EngineOptions(**SETTINGS)  # type: ignore[arg-type]
    machine = opened.manifest(opened.configure(options), options).entries["machine"]
    assert (machine["processor"], machine["num_cores"]) == (processor(), 1)


def test_the_same_server_starts_and_has_the_same_hash(model: Path, frozen: Path) -> None:
    assert load(model, policy_file=frozen).identity.manifest == RunManifest.read(frozen).digest


def test_what_a_batch_adds_of_its_own_does_not_concern_a_server(
    model: Path, frozen: Path, tmp_path: Path
) -> None:
    RunManifest.read(frozen).extended("batch", {"seed": 3}).write(tmp_path / "batch.json")
    load(model, policy_file=tmp_path / "batch.json")


def test_every_thing_that_drifted_is_named_before_weights_are_read(
    model: Path, frozen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = json.loads(json.dumps(RunManifest.read(frozen).entries))
    entries["engine"]["num_slots"] = 4
    entries["precision"]["kv_format"] = "int8"
    entries["versions"]["jax"] = "0.0"
    RunManifest(entries).write(tmp_path / "old.json")
    monkeypatch.delattr(OpenedModel, "build_engine")
    with pytest.raises(ValueError, match=r"route 'stories' is not what .*old\.json says: ") as refusal:
        load(model, policy_file=tmp_path / "old.json", max_waiting=5, prefix_cache=False)
    told = str(refusal.value).partition(" says: ")[2].split("; ")
    assert [phrase.split(" is ")[0] for phrase in told] == [
        "engine.num_slots",
        "precision.kv_format",
        "scheduler.policy.max_waiting",
        "scheduler.prefix_caching",
        "versions.jax",
    ]
    assert told[1:4] == [
        'precision.kv_format is "float32" and was "int8"',
        "scheduler.policy.max_waiting is 5 and was null",
        "scheduler.prefix_caching is false and was true",
    ]


def test_kernels_that_drifted_are_named(model: Path, frozen: Path, tmp_path: Path) -> None:
    entries = json.loads(json.dumps(RunManifest.read(frozen).entries))
    now = entries["kernels"]["ragged_paged_attention"]
    entries["kernels"]["ragged_paged_attention"] = "another"
    RunManifest(entries).write(tmp_path / "old.json")
    drifted = f'says: kernels.ragged_paged_attention is "{now}" and was "another"$'
    with pytest.raises(ValueError, match=drifted):
        load(model, policy_file=tmp_path / "old.json")


def test_a_route_that_drifted_is_named_before_another_is_loaded(
    model: Path, frozen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunManifest.read(frozen).extended("versions", {"jax": "0.0"}).write(tmp_path / "old.json")
    routes = [
        RouteArguments(name=name, model=str(model), generation_config="auto", policy_file=policy)
        for name, policy in (("sound", None), ("drifted", tmp_path / "old.json"))
    ]
    monkeypatch.delattr(OpenedModel, "build_engine")
    with pytest.raises(ValueError, match=r"route 'drifted' is not what .*old\.json says: "):
        next(iter(ModelLoader(routes, StatisticsOptions(), progress=False)))


def test_a_place_where_no_manifest_can_be_is_refused_at_once(tmp_path: Path) -> None:
    diary = tmp_path / "diary.json"
    diary.write_text("my diary")
    routes = [RouteArguments(name="one", model="nonesuch", generation_config="auto")]
    for path, complaint in (
        (tmp_path / "nonesuch" / "m.json", "there is no folder"),
        (diary, "is no manifest, and is not written over"),
    ):
        with pytest.raises(ValueError, match=complaint):
            ModelLoader(routes, StatisticsOptions(), progress=False, manifest_file=path)


def test_one_file_is_for_one_route(tmp_path: Path) -> None:
    routes = [RouteArguments(name=name, model="m", generation_config="auto") for name in ("one", "two")]
    with pytest.raises(ValueError, match="is for one model, and there are 2 routes"):
        ModelLoader(routes, StatisticsOptions(), progress=False, manifest_file=tmp_path / "m.json")
