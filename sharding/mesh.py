"""Meshes by name: `tensor=4,expert=2` to the devices of this process."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sharding.rules import DATA, EXPERT, PIPE, TENSOR

AXES = (DATA, PIPE, EXPERT, TENSOR)
"""What a mesh can have, the outermost first: neighbours share what is exchanged most."""
MeshAxes = tuple[tuple[str, int], ...]
"""The axes above 1 of a mesh with their sizes, in the order of `AXES`; empty for a single device."""


def parse_mesh(text: str) -> MeshAxes:
    """The axes of a name such as `tensor=4,expert=2`.

    Raises ValueError, saying what is expected, for anything else.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh {text!r}: expected auto, or tensor=N, expert=N, pipe=N and data=N, with commas"
            )
        if axis in sizes:
            raise ValueError(f"mesh {text!r}: {axis} is there twice")
        sizes[axis] = int(size)
    return tuple((axis, sizes[axis]) for axis in AXES if sizes.get(axis, 1) > 1)


def mesh_name(axes: MeshAxes) -> str:
    """What `parse_mesh` reads."""
    return ",".join(f"{axis}={size}" for axis, size in reversed(axes)) or f"{TENSOR}=1"


def mesh_size(axes: MeshAxes) -> int:
    """Devices that it takes."""
    return math.prod(size for _, size in axes)


def make_mesh(axes: MeshAxes, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The first devices that it takes, of these or of this process; None for a single one."""
    if not axes:
        return None
    return _make_mesh(axes, tuple(jax.devices() if devices is None else devices))


def replica_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh as a program sees it inside `per_replica`, where every replica's is alike: that of the first.
    None where a replica is a single device."""
    if mesh is None or DATA not in mesh.axis_names:
        return mesh
    names = mesh.axis_names[1:]
    return Mesh(mesh.devices[0], names, axis_types=(AxisType.Auto,) * len(names)) if names else None


@functools.cache
def stage_mesh(mesh: Mesh, stage: int) -> Mesh:
    """The devices of one stage of a mesh that has stages, along its other axes; a single one as tensor=1."""
    position = mesh.axis_names.index(PIPE)
    names = tuple(name for name in mesh.axis_names if name != PIPE) or (TENSOR,)
    devices = np.take(mesh.devices, [stage], position).reshape([mesh.shape.get(name, 1) for name in names])
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


@functools.cache
def _make_mesh(axes: MeshAxes, devices: tuple[Any, ...]) -> Mesh:
    names, sizes = zip(*axes, strict=True)
    size = mesh_size(axes)
    automatic = (AxisType.Auto,) * len(axes)
    if size == len(devices) == jax.device_count() and devices[0].platform != "cpu":
        # So that neighbours in the mesh are neighbours by wire.
        return jax.make_mesh(sizes, names, axis_types=automatic, devices=devices)
    return Mesh(np.array(devices[:size]).reshape(sizes), names, axis_types=automatic)
