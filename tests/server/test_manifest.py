"""A server that writes its manifest, and one that is held to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def test_the_same_server_starts_and_has_the_same_hash(model: Path, frozen: Path) -> None:
    assert load(model, policy_file=frozen).identity.manifest == RunManifest.read(frozen).digest


def test_what_a_batch_adds_of_its_own_does_not_concern_a_server(
    model: Path, frozen: Path, tmp_path: Path
) -> None:
    RunManifest.read(frozen).extended("batch", {"seed": 3}).write(tmp_path / "batch.json")
    load(model, policy_file=tmp_path / "batch.json")


def test_every_thing_that_drifted_is_named(model: Path, frozen: Path, tmp_path: Path) -> None:
    entries = json.loads(json.dumps(RunManifest.read(frozen).entries))
    entries["engine"]["num_slots"] = 4
    entries["kernels"]["ragged_paged_attention"] = "another"
    entries["precision"]["kv_format"] = "int8"
    entries["versions"]["jax"] = "0.0"
    RunManifest(entries).write(tmp_path / "old.json")
    with pytest.raises(ValueError, match=r"route 'stories' is not what .*old\.json says: ") as refusal:
        load(model, policy_file=tmp_path / "old.json", max_waiting=5, prefix_cache=False)
    told = str(refusal.value).partition(" says: ")[2].split("; ")
    assert [phrase.split(" is ")[0] for phrase in told] == [
        "engine.num_slots",
        "kernels.ragged_paged_attention",
        "precision.kv_format",
        "scheduler.policy.max_waiting",
        "scheduler.prefix_caching",
        "versions.jax",
    ]
    assert told[2:5] == [
        'precision.kv_format is "float32" and was "int8"',
        "scheduler.policy.max_waiting is 5 and was null",
        "scheduler.prefix_caching is false and was true",
    ]


def test_one_file_is_for_one_route(tmp_path: Path) -> None:
    routes = [RouteArguments(name=name, model="m", generation_config="auto") for name in ("one", "two")]
    with pytest.raises(ValueError, match="is for one model, and there are 2 routes"):
        ModelLoader(routes, StatisticsOptions(), progress=False, manifest_file=tmp_path / "m.json")
