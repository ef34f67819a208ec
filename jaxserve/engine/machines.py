"""Machines that need not be there: what compiles for them, and how many devices they have."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

# libtpu looks for a TPU's metadata service, and locks out a second process, unless told otherwise.
COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What the environment must hold before jax is first imported in a process that compiles for a machine."""

_TPU_TOPOLOGIES = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8"),
}
"""Of each kind of chip the shapes that its compiler knows, rising."""

_NAME = re.compile(r"([a-z0-9]+?)(?:-(\d+))?")


@dataclass(frozen=True)
class Machine:
    """Some devices of one kind."""

    chip: str
    """A name of `jaxserve.planning.chips`."""
    num_devices: int

    @classmethod
    def parse(cls, name: str) -> Machine:
        """From a name such as v6e-8, or h200 for one device.

        Raises ValueError, with what there is, for a machine that no compiler here knows.
        """
        match = _NAME.fullmatch(name)
        chips = (*_TPU_TOPOLOGIES, "h200")
        if match is None or match[1] not in chips:
            raise ValueError(
                f"target {name!r} is not one of {', '.join(chips)}, followed by -N for N devices"
            )
        machine = cls(match[1], int(match[2] or 1))
        most = 8 if machine.platform == "gpu" else _size(_TPU_TOPOLOGIES[machine.chip][-1])
        if not 1 <= machine.num_devices <= most:
            raise ValueError(f"target {name!r}: {machine.chip} comes with 1 to {most} devices")
        return machine

    @property
    def platform(self) -> str:
        return "gpu" if self.chip == "h200" else "tpu"

    def require_compiler(self) -> None:
        """Raises ValueError, saying what to install, where its compiler is missing."""
        package, extra = (
            ("libtpu", "compilers-tpu") if self.platform == "tpu" else ("jax_cuda13_plugin", "compilers-gpu")
        )
        if find_spec(package) is None:
            raise ValueError(
                f"compiling for {self.chip} needs the package {package}: install jaxserve[{extra}]"
            )

    @contextlib.contextmanager
    def mesh(self, axes: Sequence[tuple[str, int]]) -> Iterator[Mesh]:
        """Its devices along axes of these names and sizes; inside, programs compile for it."""
        import jax
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import Mesh

        assert all(os.environ.get(key) == value for key, value in COMPILER_ENVIRONMENT.items())
        if self.platform == "tpu":
            fitting = [shape for shape in _TPU_TOPOLOGIES[self.chip] if _size(shape) >= self.num_devices]
            topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{self.chip}:{fitting[0]}")
        else:
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=H200, topology=f"1x1x{self.num_devices}"
            )
        names, sizes = zip(*axes, strict=True)
        if len(topology.devices) == self.num_devices and len(axes) == 1:
            mesh = topologies.make_mesh(topology, sizes, names)
        else:  # It refuses some pairs of axes that a torus can have all the same.
            mesh = Mesh(np.array(topology.devices[: self.num_devices]).reshape(sizes), names)
        with jax.default_device(topology.devices[0]), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield mesh


def _size(topology: str) -> int:
    return math.prod(map(int, topology.split("x")))


H200 = """\
# NVIDIA H200 SXM: data sheet (141 GB HBM3e at 4.8 TB/s, NVLink), Hopper tuning guide and CUDA programming
# guide, compute capability 9.0 (SMs, shared memory, registers and threads of an SM, 50 MB L2).
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 141000000000
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  ecc_enabled: true
  device_address_bits: 64
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H200"
"""
"""XLA's description of a GPU."""
