"""Which of how many processes this one is, as launchers tell it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

DEFAULT_PORT = 8476
"""Of process 0's coordination service where nobody names one; Cloud TPU's workers leave it free."""
_SLURM_PORTS = 61440, 4096
"""The first port for SLURM jobs and how many there are: jobs of one node take different ones, as in JAX."""


@dataclass(frozen=True)
class ProcessPlace:
    """This process among those of its job."""

    coordinator: str
    """`host:port` of process 0, where JAX's coordination service listens."""
    num_processes: int
    process_id: int
    """From 0, which leads."""
    source: str = "arguments"
    """Who said so, for messages."""

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"coordinator {self.coordinator!r} ({self.source}): expected HOST:PORT")
        if self.num_processes < 1:
            raise ValueError(f"{self.num_processes} processes ({self.source}): expected 1 or more")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process {self.process_id} of {self.num_processes} ({self.source}): expected 0 to "
                f"{self.num_processes - 1}"
            )

    @property
    def coordinator_host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")


def find_place(
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> ProcessPlace:
    """The place that arguments give, or else the environment.

    Args:
        environment: of this process.
        coordinator: `host:port` of process 0; with the two others it needs nothing of the environment.
        num_processes: of the job.
        process_id: of this one.

    Known are JAX's own variables (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), those of
    LeaderWorkerSet, of Cloud TPU (GKE, several slices included), of JobSet and of SLURM, in this order;
    single ones are overruled by JAX's, and those by the arguments.

    Raises ValueError, naming what is missing or contradicts itself.
    """
    own = {
        "coordinator": coordinator or environment.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _given(num_processes, environment, "JAX_NUM_PROCESSES"),
        "process_id": _given(process_id, environment, "JAX_PROCESS_ID"),
    }
    missing = [name for name, value in own.items() if value is None]
    if not missing:
        return ProcessPlace(**own)  # type: ignore[arg-type]
    for name, launcher in _LAUNCHERS.items():
        found = launcher(environment)
        if found is not None:
            told = {key: value for key, value in own.items() if value is not None}
            return ProcessPlace(**(found | told), source=name)  # type: ignore[arg-type]
    raise ValueError(
        f"no {', '.join(missing)}: neither arguments nor environment say which process this is; known "
        f"are JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and {', '.join(_LAUNCHERS)}"
    )


def _given(value: int | None, environment: Mapping[str, str], name: str) -> int | None:
    return _number(environment, name) if value is None and name in environment else value


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.strip().isdecimal():
        raise ValueError(f"{name}={text!r} is no number of processes")
    return int(text)


_Found = dict[str, object]


def _leader_worker_set(environment: Mapping[str, str]) -> _Found | None:
    """https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables"""
    if "LWS_LEADER_ADDRESS" not in environment:
        return None
    return {
        "coordinator": f"{environment['LWS_LEADER_ADDRESS']}:{DEFAULT_PORT}",
        "num_processes": _number(environment, "LWS_GROUP_SIZE"),
        "process_id": _number(environment, "LWS_WORKER_INDEX"),
    }


def _cloud_tpu(environment: Mapping[str, str]) -> _Found | None:
    """What GKE sets for the workers of a slice, and Megascale for several slices."""
    hosts = (environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")).split(
        ","
    )
    if "TPU_WORKER_ID" not in environment or not hosts[0]:
        return None
    several = "MEGASCALE_NUM_SLICES" in environment
    num_slices = _number(environment, "MEGASCALE_NUM_SLICES") if several else 1
    slice_id = _number(environment, "MEGASCALE_SLICE_ID") if several else 0
    leader = environment.get("MEGASCALE_COORDINATOR_ADDRESS") if several else None
    if several and leader is None:
        raise ValueError(f"{num_slices} slices (Cloud TPU), and no MEGASCALE_COORDINATOR_ADDRESS")
    return {
        "coordinator": f"{(leader or hosts[0]).split(':')[0]}:{DEFAULT_PORT}",
        "num_processes": len(hosts) * num_slices,
        "process_id": slice_id * len(hosts) + _number(environment, "TPU_WORKER_ID"),
    }


def _job_set(environment: Mapping[str, str]) -> _Found | None:
    """Pods of an Indexed Job have JOB_COMPLETION_INDEX; the names come by the downward API.

    A job's pods are told their number by nobody: NUM_PROCESSES or JAX_NUM_PROCESSES has to say it.
    """
    names = ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX")
    if any(name not in environment for name in names):
        return None
    job_set, replicated, _ = (environment[name] for name in names)
    count = next((name for name in ("JAX_NUM_PROCESSES", "NUM_PROCESSES") if name in environment), None)
    if count is None:
        raise ValueError("JobSet does not tell its pods how many they are: set NUM_PROCESSES")
    return {
        "coordinator": f"{job_set}-{replicated}-0-0.{job_set}:{DEFAULT_PORT}",
        "num_processes": _number(environment, count),
        "process_id": _number(environment, "JOB_COMPLETION_INDEX"),
    }


def _slurm(environment: Mapping[str, str]) -> _Found | None:
    """What `srun` sets for each task of a step."""
    nodes = environment.get("SLURM_STEP_NODELIST")
    if nodes is None or "SLURM_PROCID" not in environment:
        return None
    first, size = _SLURM_PORTS
    return {
        "coordinator": f"{_first_host(nodes)}:{first + _number(environment, 'SLURM_JOB_ID') % size}",
        "num_processes": _number(environment, "SLURM_NTASKS"),
        "process_id": _number(environment, "SLURM_PROCID"),
    }


def _first_host(nodes: str) -> str:
    """The first of a node list: `a1`, `a1,b2`, `a[1-3],b2`, `a[01,03-07]-ib`."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no node")
    return "".join(part or "" for part in match.groups())


_LAUNCHERS: dict[str, Callable[[Mapping[str, str]], _Found | None]] = {
    "LeaderWorkerSet": _leader_worker_set,
    "Cloud TPU": _cloud_tpu,
    "JobSet": _job_set,
    "SLURM": _slurm,
}
