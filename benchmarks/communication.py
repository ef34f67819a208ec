"""What exchanges between devices take of a step on real chips: modelled, from programs that were compiled.

How many exchanges a step has, and the bytes that a device sends for them, are those of the programs that
`jaxserve compile --json` has built with the compilers of such machines. A step is taken to be its exchanges
and then its arithmetic and memory traffic, by the roofline of `jaxserve.planning.cost_model`; nothing
overlaps. Bandwidths are the vendors', at the share that the planner takes kernels to reach; the time that an
exchange of nothing takes is an estimate, so shares are given without it too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.engine.machines import Machine
from jaxserve.plan import StepShape
from jaxserve.planning.chips import Chip, find_chip
from jaxserve.planning.cost_model import ALL_REDUCE_LATENCY, CostModel, Efficiency
from jaxserve.planning.footprint import Footprint
from jaxserve.planning.meshes import ChipMesh
from jaxserve.planning.models import find_model
from sharding import parse_mesh

COMPILED = Path(__file__).parent / "results" / "compile-large-models.json"
CONTEXT = 1024
"""Tokens of each sequence before a decode step."""
RING_SHARE = {"v5e": 2 / 4, "v6e": 2 / 4, "v5p": 2 / 6, "h200": 1.0}
"""Of a chip's links, those that a ring through a small slice uses: two neighbours of four on a 2D torus ("ICI
ports per chip: 4", docs.cloud.google.com/tpu/docs/v6e and v5e), of six on a 3D torus (.../v5p). GPUs reach
each other through a switch, with all of theirs."""


@dataclasses.dataclass(frozen=True)
class Share:
    """Of one step: seconds of its parts, and what exchanges take of them all."""

    rows: int
    decode: bool
    exchanges: int
    sent_bytes: int
    wire_seconds: float
    """That a device sends at the bandwidth of its links."""
    waiting_seconds: float
    """An estimated latency for each exchange."""
    other_seconds: float

    @property
    def least(self) -> float:
        """Of the step, without latencies."""
        return self.wire_seconds / (self.wire_seconds + self.other_seconds)

    @property
    def most(self) -> float:
        """Of the step, latencies among it."""
        communication = self.wire_seconds + self.waiting_seconds
        return communication / (communication + self.other_seconds)


def shares(compiled: Path = COMPILED) -> Iterator[dict[str, Any]]:
    """For each machine of a file of compiled steps, and each of these, what exchanges take of it."""
    for run in json.loads(compiled.read_text())["runs"]:
        model, machine = find_model(run["model"]), Machine.parse(run["target"])
        for step in run["steps"]:
            share = share_of(model, machine, run["mesh"], step)
            names = {name: run[name] for name in ("model", "target", "mesh", "compiler")}
            yield {**names, **dataclasses.asdict(share), "least": share.least, "most": share.most}


def share_of(model: ModelConfig, machine: Machine, mesh_name: str, step: Mapping[str, Any]) -> Share:
    """Of one step, as `jaxserve compile --json` tells of it: its shape, `num_exchanges` and `sent_bytes`."""
    shape, chip = StepShape(**step["shape"]), find_chip(machine.chip)
    bandwidth = chip.link_bandwidth * RING_SHARE[chip.name] * Efficiency().memory
    return Share(
        shape.rows,
        shape.decode,
        step["num_exchanges"],
        step["sent_bytes"],
        step["sent_bytes"] / bandwidth,
        step["num_exchanges"] * ALL_REDUCE_LATENCY,
        _other_seconds(model, chip, mesh_name, shape),
    )


def _other_seconds(model: ModelConfig, chip: Chip, mesh_name: str, shape: StepShape) -> float:
    """Of a program's arithmetic and memory traffic, of all ticks where there are stages."""
    mesh = ChipMesh(**dict(parse_mesh(mesh_name)))
    # On stages a program that decodes is one tick, of one of the groups that a step of the model is of.
    programs = mesh.pipe if shape.decode else 1
    rows, logit_rows = programs * shape.rows, programs * shape.logit_rows
    whole = StepShape(rows, programs * shape.sequences, logit_rows, decode=shape.decode)
    # The shape is that of each replica, the sequences are those of all.
    if shape.decode:
        contents = np.full(mesh.data * rows, CONTEXT), np.ones(mesh.data * rows, np.int64)
    else:
        contents = np.zeros(mesh.data, np.int64), np.full(mesh.data, rows)
    cost = CostModel(Footprint.of(model), chip, mesh=mesh).cost(whole, *contents)
    return (cost.seconds - cost.collectives) / programs
