"""Machines that their compilers can be asked for without being there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxserve.model.transformer import LayerLoop

# libtpu looks for a TPU's metadata service, and locks out a second process, unless told otherwise.
COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Target:
    """One machine: what compiles for it, and how the engine places a model on it."""

    name: str
    backend: str
    """JAX's name of its kind of device: tpu or gpu."""
    package: str
    """The module without which its compiler is missing."""
    topology: str
    num_devices: int
    layer_loop: LayerLoop

    @property
    def missing(self) -> str | None:
        """Why nothing can be compiled for it here, or None."""
        return None if find_spec(self.package) else f"{self.package} is not installed"


TARGETS = {
    "v6e": Target("v6e", "tpu", "libtpu", "v6e:2x4", 8, "stacked"),
    "h200": Target("h200", "gpu", "jax_cuda13_plugin", "1x1x1", 1, "unrolled"),
    "h200x8": Target("h200x8", "gpu", "jax_cuda13_plugin", "1x1x8", 8, "unrolled"),
}


@contextlib.contextmanager
def target_mesh(target: Target) -> Iterator[Mesh]:
    """A mesh of the target's devices along the axis "tensor", inside which programs compile for it.

    COMPILER_ENVIRONMENT must have been in force when this process first imported jax.
    """
    import jax
    from jax.experimental import topologies

    from sharding import TENSOR

    assert all(os.environ.get(name) == value for name, value in COMPILER_ENVIRONMENT.items())
    if target.backend == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    else:
        description = (Path(__file__).parent / "h200.txtpb").read_text()
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=description, topology=target.topology
        )
    mesh = topologies.make_mesh(topology, (target.num_devices,), (TENSOR,))
    with jax.default_device(topology.devices[0]), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield mesh
