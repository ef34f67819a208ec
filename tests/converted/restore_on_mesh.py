"""Converts the model of the sharded step, restores it over eight devices, and says what came of it."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.converted import convert, restore_parameters
from jaxserve.quantization import recipe_named
from jaxserve.quantization.weight import QuantisedWeight
from jaxserve.weights import open_checkpoint, open_converted
from sharding import TENSOR, named_sharding
from tests.oracle.tiny_models import write_tiny_model


def bytes_read() -> int:
    """By this process, from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def main(folder: Path) -> None:
    source = open_checkpoint(write_tiny_model("llama_mha", folder / "source"))
    convert(source, folder / "out", recipe=recipe_named("int8"))
    converted = open_converted(folder / "out")
    mesh = Mesh(np.array(jax.devices()[:2]), (TENSOR,))
    whole = dict(restore_parameters(converted, "float32"))
    before = bytes_read()
    spread = dict(restore_parameters(converted, "float32", functools.partial(named_sharding, mesh=mesh)))
    jax.block_until_ready(spread)
    num_read = bytes_read() - before
    stored = sum(path.stat().st_size for path in (folder / "out" / "parameters").rglob("*") if path.is_file())
    pairs = list(zip(jax.tree.leaves(spread), jax.tree.leaves(whole), strict=True))
    gate_up = spread["layers.0.gate_up"]
    assert isinstance(gate_up, QuantisedWeight)
    values = gate_up.values
    report = {
        "equal": all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs),
        "devices": len(values.sharding.device_set),
        "shard": values.addressable_shards[0].data.shape,
        "shape": values.shape,
        "read": num_read / stored,
    }
    print(json.dumps(report))


main(Path(sys.argv[1]))
