"""Eight devices on a CPU, for a process that a test starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxserve.weights import cache_home

REPOSITORY = Path(__file__).resolve().parents[2]
_DEVICES = "--xla_force_host_platform_device_count=8"
EIGHT_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _DEVICES}
NOT_OPTIMISED = {
    "XLA_FLAGS": f"{_DEVICES} --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}
"""Programs that run a few times are not worth optimising."""
KEPT = {
    "JAX_COMPILATION_CACHE_DIR": str(cache_home() / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Where the library keeps programs too: a step that is run, and whose text is read, is compiled once."""


def report_of(module: str, *arguments: str, given: str | None = None) -> Any:
    """What a module of these tests prints as JSON, run on eight devices. `given`: for it to read."""
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env=os.environ | EIGHT_DEVICES | NOT_OPTIMISED | KEPT,
        input=given,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)
