"""Arguments of commands that can run as several processes at once, all with the same command line."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from jaxserve.interrupts import interrupts_deferred

if TYPE_CHECKING:
    from sharding.processes import Job


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes",
        "The same command, started in each, has their devices share the model, by --mesh. The first answers.",
    )
    add = group.add_argument
    add(
        "--distributed",
        action="store_true",
        help="take part as the environment says: JAX_COORDINATOR_ADDRESS and the like, LeaderWorkerSet, "
        "Cloud TPU, JobSet or SLURM",
    )
    add("--coordinator", metavar="HOST:PORT", help="of process 0, for all to meet (default: as there)")
    add("--num-processes", type=int, metavar="N", help="that take part (default: as there)")
    add("--process-id", type=int, metavar="I", help="of this one, from 0 (default: as there)")


def join_processes(args: argparse.Namespace) -> Job | None:
    """The job that these arguments name, joined; None where they name none.

    Raises ValueError for places that are missing or contradict themselves, or cannot be taken.
    """
    given = {name: getattr(args, name) for name in ("coordinator", "num_processes", "process_id")}
    if not args.distributed and all(value is None for value in given.values()):
        return None
    with interrupts_deferred():  # Broken off in the middle, the import of jaxlib crashes.
        import jax

        from sharding.processes import find_place, join

    place = find_place(os.environ, **given)
    try:
        return join(place)
    except (jax.errors.JaxRuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"process {place.process_id} of {place.num_processes} cannot meet the others at "
            f"{place.coordinator}: {reason}"
        ) from error


def follows(job: Job | None) -> bool:
    """Whether this process does what another one says, and neither reads nor writes anything itself."""
    return job is not None and not job.leads
