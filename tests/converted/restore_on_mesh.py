"""Saves a random model, restores it whole and over two devices, and says what came of it.

Read once is: looked at where the files are mapped, and copied nowhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.converted import restore_parameters, save_parameters
from jaxserve.engine.parameters import quantised
from jaxserve.model.parameters import model_parameters
from jaxserve.quantization import recipe_named
from jaxserve.quantization.weight import QuantisedWeight
from jaxserve.weights import ConvertedCheckpoint
from sharding import TENSOR, named_sharding

MODEL = ModelConfig(
    family="llama",
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=2048,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    layers=(LayerKind(),) * 4,
    max_position=256,
)
"""Large enough for what is written about arrays to be little beside them."""


def random_parameters() -> Iterator[tuple[str, np.ndarray]]:
    random = np.random.default_rng(0)
    for name, info in model_parameters(MODEL):
        yield name, random.standard_normal(info.shape, np.float32)


def bytes_read() -> int:
    """By this process, from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def mapped_bytes(arrays: list[jax.Array], folder: Path) -> int:
    """Of these, in the memory that files of a folder are mapped to."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    return sum(
        array.nbytes
        for array in arrays
        if any(first <= array.unsafe_buffer_pointer() < end for first, end in ranges)
    )


def main(folder: Path) -> None:
    recipe = recipe_named("int8")
    groups = save_parameters(quantised(random_parameters(), MODEL, recipe, "float32"), folder, 4_000_000)
    stored = ConvertedCheckpoint(folder, MODEL, None, "", recipe.label, "float32", groups)
    mesh = Mesh(np.array(jax.devices()), (TENSOR,))
    spread = dict(
        restore_parameters(stored, "float32", lambda shape, axes, _: named_sharding(shape, axes, mesh))
    )
    before = bytes_read()
    whole = jax.block_until_ready(dict(restore_parameters(stored, "float32")))
    num_read = bytes_read() - before
    leaves = jax.tree.leaves(whole)
    num_stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    pairs = zip(jax.tree.leaves(spread), leaves, strict=True)
    gate_up = spread["layers.0.gate_up"]
    assert isinstance(gate_up, QuantisedWeight)
    report = {
        "equal": all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs),
        "groups": len(groups),
        "shards": [shard.data.shape for shard in gate_up.values.addressable_shards],
        "read": num_read / num_stored,
        "mapped": mapped_bytes(leaves, folder) / sum(array.nbytes for array in leaves),
    }
    print(json.dumps(report))


main(Path(sys.argv[1]))
