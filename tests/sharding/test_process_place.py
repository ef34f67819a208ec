"""Which process this is, by arguments and by what launchers put into the environment."""

from __future__ import annotations

import re

import pytest
from jax._src.clusters.slurm_cluster import SlurmCluster

from sharding.processes import find_place

JAX = {"JAX_COORDINATOR_ADDRESS": "head:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
LWS = {"LWS_LEADER_ADDRESS": "vllm-0.vllm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_WORKER_ID": "2"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "s0:8080"}
JOB_SET = {
    "JOBSET_NAME": "llm",
    "REPLICATED_JOB_NAME": "workers",
    "JOB_COMPLETION_INDEX": "5",
    "NUM_PROCESSES": "8",
}
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "node[007,009-012],other3",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environment", "coordinator", "num_processes", "process_id", "source"),
    [
        (JAX, "head:1234", 4, 3, "arguments"),
        (LWS, "vllm-0.vllm.default:8476", 2, 1, "LeaderWorkerSet"),
        (TPU, "t0:8476", 4, 2, "Cloud TPU"),
        (TPU | SLICES, "s0:8476", 8, 6, "Cloud TPU"),
        (JOB_SET, "llm-workers-0-0.llm:8476", 8, 5, "JobSet"),
        (SLURM, "node007:61809", 6, 4, "SLURM"),
    ],
)
def test_what_launchers_say(
    environment: dict[str, str], coordinator: str, num_processes: int, process_id: int, source: str
) -> None:
    place = find_place(environment)
    assert (place.coordinator, place.num_processes, place.process_id, place.source) == (
        coordinator,
        num_processes,
        process_id,
        source,
    )


@pytest.mark.parametrize("nodes", ["one", "a1,b2", "n[01-12],x", "n[3,5-7]", "gpu-[4-5]"])
def test_slurm_is_read_as_jax_reads_it(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = SLURM | {"SLURM_STEP_NODELIST": nodes}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert SlurmCluster.is_env_present()
    assert find_place(environment).coordinator == SlurmCluster.get_coordinator_address(None, None)


def test_arguments_overrule_the_environment() -> None:
    place = find_place(JAX, coordinator="here:9", num_processes=2, process_id=1)
    assert (place.coordinator, place.num_processes, place.process_id) == ("here:9", 2, 1)
    assert find_place(SLURM, coordinator="here:9").coordinator == "here:9"
    assert find_place(LWS | {"JAX_COORDINATOR_ADDRESS": "there:7"}).coordinator == "there:7"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "no coordinator, num_processes, process_id: neither"),
        ({"JAX_PROCESS_ID": "0"}, "no coordinator, num_processes: neither"),
        (JAX | {"JAX_PROCESS_ID": "4"}, "process 4 of 4 (arguments): expected 0 to 3"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "head"}, "coordinator 'head' (arguments): expected HOST:PORT"),
        (JAX | {"JAX_NUM_PROCESSES": "many"}, "JAX_NUM_PROCESSES='many' is no number"),
        (LWS | {"LWS_GROUP_SIZE": "0"}, "0 processes (LeaderWorkerSet): expected 1 or more"),
        ({k: v for k, v in JOB_SET.items() if k != "NUM_PROCESSES"}, "set NUM_PROCESSES"),
        (TPU | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}, "MEGASCALE_COORDINATOR_ADDRESS"),
    ],
)
def test_what_is_missing_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_place(environment)
