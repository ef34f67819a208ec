"""Run by tests: one process of a job, that loads a model's weights and tells what that takes.

    python -m tests.sharding.load_member MODEL MESH [PLACE]

Prints one JSON object: bytes of the parameters that its devices have, by how much loading has raised the most
memory that the process has had, and what it has read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax

from jaxserve.commands.processes import add_process_arguments, join_processes
from jaxserve.engine.build import configure, load_parameters
from jaxserve.engine.options import EngineOptions
from jaxserve.weights import open_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("mesh")
    add_process_arguments(parser)
    args = parser.parse_args()
    join_processes(args)
    checkpoint = open_checkpoint(args.model)
    options = EngineOptions(mesh=args.mesh, dtype="float32", max_model_len=64, num_slots=1)
    config = configure(checkpoint, options)
    memory, read = told("status", "VmHWM"), told("io", "rchar")
    params = load_parameters(checkpoint, config)
    jax.block_until_ready(params)
    shards = (shard for array in jax.tree.leaves(params) for shard in array.addressable_shards)
    report = {
        "share": sum(shard.data.nbytes for shard in shards),
        "memory": (told("status", "VmHWM") - memory) * 1024,
        "read": told("io", "rchar") - read,
    }
    print(json.dumps(report))


def told(file: str, name: str) -> int:
    """What the system says of this process."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
