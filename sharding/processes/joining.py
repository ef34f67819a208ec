"""Becoming one of the processes of a job."""

from __future__ import annotations

import atexit
import os
import sys

import jax
import numpy as np

from sharding.processes.job import FollowingJob, Job, LeadingJob
from sharding.processes.place import ProcessPlace

WAIT_SECONDS = 300
"""For all processes of a job to come."""
_SECRET_BYTES = 16

_joined: list[Job] = []
"""The job of this process, if it has joined one: a process has one for its life, as it has one JAX."""


def current_job() -> Job | None:
    """The job of this process, if it has joined one of several processes."""
    return _joined[0] if _joined else None


def join(place: ProcessPlace, *, wait_seconds: int = WAIT_SECONDS) -> Job | None:
    """Take a place, and wait until all others are taken; None for the only process of a job.

    Every process of the job calls this, once, before anything that uses a device. From then on `jax.devices`
    are those of all processes. If one is lost later, this process ends with status 1 and a line on standard
    error.

    Raises ValueError where this process cannot take part, RuntimeError if it has a place already.
    """
    if _joined:
        raise RuntimeError("this process has joined a job already")
    if place.num_processes == 1:
        return None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would keep SIGTERM for itself, which then ends no process any more.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        cluster_detection_method="deactivate",
        initialization_timeout=wait_seconds,
        # The links find a loss sooner, and say which; from then on nobody waits for this.
        heartbeat_timeout_seconds=wait_seconds,
    )
    if jax.default_backend() == "cpu" and jax.local_device_count() > 1:
        raise ValueError(
            f"process {place.process_id} has {jax.local_device_count()} CPU devices; in a job of several "
            "processes each has one: leave --xla_force_host_platform_device_count out of XLA_FLAGS"
        )
    if jax.default_backend() == "cpu":
        _keep_output()
    _joined.append(_lead(place, wait_seconds) if place.process_id == 0 else _follow(place))
    return _joined[0]


def smallest_of_all(value: int) -> int:
    """The smallest of the values that all processes give; each must call this."""
    if not _joined:
        return value
    # Without 64-bit types: in words of 30 bits.
    words = np.array([value >> 30, value & (2**30 - 1)], np.int32)
    from jax.experimental.multihost_utils import process_allgather

    return min((int(high) << 30) + int(low) for high, low in process_allgather(words))


def _lead(place: ProcessPlace, wait_seconds: int) -> LeadingJob:
    job = LeadingJob(place)
    _broadcast(np.array([job.port, *bytes.fromhex(job.secret)], np.int32))
    job.accept(wait_seconds)
    # Before JAX's own, which waits for everybody.
    atexit.register(job.end)
    return job


def _follow(place: ProcessPlace) -> FollowingJob:
    job = FollowingJob(place)
    port, *secret = _broadcast(np.zeros(1 + _SECRET_BYTES, np.int32)).tolist()
    job.connect(place.coordinator_host, port, bytes(secret).hex())
    return job


def _broadcast(values: np.ndarray) -> np.ndarray:
    """What process 0 has of it."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return np.asarray(broadcast_one_to_all(values))


def _keep_output() -> None:
    """Gloo says on standard output, where answers belong, whom it has connected, at any time: what is not
    Python's goes to standard error from now on."""
    sys.stdout.flush()
    own = open(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115
    os.dup2(2, 1)
    sys.stdout = own
