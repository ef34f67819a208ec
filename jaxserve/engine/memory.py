"""How much memory devices have, and what of it weights leave to pages."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxserve.config import FloatFormat, ModelConfig
from jaxserve.engine.mesh import spread_model
from jaxserve.engine.parameters import abstract_parameters
from jaxserve.model.transformer import LayerLoop
from jaxserve.quantization import Recipe
from sharding import MeshAxes
from sharding.processes import smallest_of_all

CPU_KV_MEMORY = 2**30
DEVICE_MEMORY_SHARE = 0.9


def weight_bytes(
    model: ModelConfig,
    compute_format: FloatFormat,
    layer_loop: LayerLoop,
    recipe: Recipe | None,
    axes: MeshAxes,
) -> int:
    """Of one device of a mesh. Raises ValueError where the mesh does not divide the model."""
    names, sizes = zip(*axes, strict=True) if axes else (("device",), (1,))
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    params = abstract_parameters(spread_model(model, axes), compute_format, layer_loop, recipe, mesh)
    return shard_bytes(params)


def shard_bytes(tree: Any) -> int:
    """Of one device's parts of all arrays."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(tree)
    )


def free_for_pages(memory_bytes: int, weights: int) -> int:
    """Bytes of one device's pool by default. Raises ValueError where weights take all."""
    left = int(DEVICE_MEMORY_SHARE * (memory_bytes - weights))
    if left <= 0:
        raise ValueError(f"the weights take {weights} bytes of a device that has {memory_bytes}")
    return left


def free_memory(platform: str, num_devices: int, first_device: int = 0) -> int:
    """Bytes that are free on each of the devices from the first on, those of other processes too, which all
    ask then.

    Raises ValueError for devices that do not tell.
    """
    free: list[int] = []
    for device in jax.devices()[first_device : first_device + num_devices]:
        if device.process_index != jax.process_index():
            continue
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            raise ValueError(f"the {platform} device does not tell its memory: give kv_memory")
        free.append(stats["bytes_limit"] - stats["bytes_in_use"])
    return smallest_of_all(min(free))


def default_pool(platform: str) -> int:
    """Bytes of the KV pool where no one says, and weights are not counted or lie there already."""
    if platform != "cpu":
        return free_for_pages(free_memory(platform, 1), 0)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(CPU_KV_MEMORY, physical // 4)


def return_freed_memory() -> None:
    """Give the system back what the C library keeps of freed memory, where that is glibc.

    Loading frees what it read and what it rounded, between arrays that stay: a tenth of what they take.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
