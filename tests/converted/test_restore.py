"""Parameters go straight to the devices that hold them, and no byte is read twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxserve.converted import convert, restore_parameters, save_parameters
from jaxserve.converted.mapping import MappedCheckpoint
from jaxserve.quantization import recipe_named
from jaxserve.quantization.weight import QuantisedWeight
from jaxserve.weights import ConvertedCheckpoint, open_checkpoint, open_converted
from jaxserve.weights.converted import group_folder
from tests.oracle.tiny_models import write_tiny_model

REPOSITORY = Path(__file__).resolve().parents[2]
DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count bytes read")
def test_a_mesh_holds_its_shards_and_one_device_reads_every_byte_once(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.converted.restore_on_mesh", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | DEVICES,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    report = json.loads(process.stdout)
    assert report["equal"]
    assert report["groups"] > 2
    assert report["shards"] == [[2, 1024, 512]] * 2
    assert report["mapped"] == 1.0
    assert report["read"] < 0.02


def test_a_matrix_in_several_pieces_is_put_together(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny_model("qwen2", tmp_path / "source"))
    stored = [
        (name, np.zeros_like(array) if name == "layers.1.qkv_bias" else array)  # Zeros are not written.
        for name, array in source.read("float32")
    ]
    groups = save_parameters(stored, tmp_path / "out", chunk_bytes=1024)
    converted = ConvertedCheckpoint(tmp_path / "out", source.config, None, "", None, "float32", groups)
    restored = list(restore_parameters(converted, "float32"))
    assert [name for name, _ in restored] == [name for name, _ in stored]
    for (name, ours), (_, theirs) in zip(restored, stored, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs, name)


def test_every_array_begins_where_it_can_be_used_in_place(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    # Too large to lie among the store's own records, and so odd that what follows begins at an odd place.
    sizes = {"a": 1063, "b": 2048, "c": 4097}
    stored = {
        (field, layer): random.integers(0, 99, size, np.int8)
        for field, size in sizes.items()
        for layer in range(2)
    }
    save_parameters(((f"{layer}.{field}", array) for (field, layer), array in stored.items()), tmp_path)
    found = MappedCheckpoint(group_folder(tmp_path, 0))
    for (field, layer), array in stored.items():
        member = found.member(f"{field}.{list(sizes).index(field)}.values", layer, array.shape)
        np.testing.assert_array_equal(member, array)
        assert member.ctypes.data % 64 == 0, field


def test_orbax_restores_it_too(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny_model("llama_gqa_tied", tmp_path / "source"))
    convert(source, tmp_path / "out", recipe=recipe_named("int8"))
    converted = open_converted(tmp_path / "out")
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(converted.group_folder(0).absolute())
    stacks = {name.partition(".")[0]: arrays for name, arrays in found.items()}
    layers = dict.fromkeys(stacks, 0)
    for name, parameter in restore_parameters(converted, "float32"):
        field = name.rpartition(".")[2]
        own = parameter if isinstance(parameter, QuantisedWeight) else None
        arrays = {"values": own.values, "scales": own.scales} if own else {"values": parameter}
        for part, array in arrays.items():
            np.testing.assert_array_equal(np.asarray(stacks[field][part][layers[field]]), array, name)
        layers[field] += 1
    assert layers == {field: len(arrays["values"]) for field, arrays in stacks.items()}
