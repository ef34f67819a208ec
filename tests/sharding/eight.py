"""Eight devices on a CPU, for a process that a test starts."""

from __future__ import annotations

_DEVICES = "--xla_force_host_platform_device_count=8"
EIGHT_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _DEVICES}
NOT_OPTIMISED = {
    "XLA_FLAGS": f"{_DEVICES} --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}
"""Programs that run a few times are not worth optimising."""
