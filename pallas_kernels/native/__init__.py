"""Kernels for CPU in C++: built for the machine at hand where it has a compiler; XLA does without.

Nothing is built or used before `load` is called. A `Target` says whether a program may use them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jaxlib.version

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCES = (
    "gated_activation/cpu.cc",
    "int8_matmul/cpu.cc",
    "ragged_paged_attention/cpu.cc",
    "rms_norm/cpu.cc",
)
_HEADERS = (
    "native/ffi.h",
    "native/lanes.h",
    "native/vectors.h",
    "native/amx.h",
    "int8_matmul/scaled.h",
    "int8_matmul/amx.h",
    "ragged_paged_attention/amx.h",
)
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
"""More come from CXXFLAGS in the environment."""
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120.0
INT8_MATMUL = "JaxserveInt8Matmul"
ATTENTION = "JaxserveRaggedPagedAttention"
RMS_NORM = "JaxserveRmsNorm"
GATED_ACTIVATION = "JaxserveGatedActivation"

_libraries: list[ctypes.CDLL] = []
"""The one that has been loaded: what is registered must stay."""
_failures: dict[Path, str] = {}
"""Why those that could not be built were not; nobody waits for the compiler again."""


def load(folder: Path) -> str | None:
    """Make the kernels known to XLA, built first if `folder` does not hold them for this machine.

    Returns why that cannot be, or None. Again, it does nothing.
    """
    if _libraries:
        return None
    if os.environ.get("JAXSERVE_NATIVE") == "0":
        return "JAXSERVE_NATIVE is 0"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        return f"there is no C++ compiler ({', '.join(_COMPILERS)})"
    library = folder / f"{_key(compiler)}.so"
    if not library.exists() and library not in _failures and (failure := _build(compiler, library)):
        _failures[library] = failure
    if library in _failures:
        return _failures[library]
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    for name in (INT8_MATMUL, ATTENTION, RMS_NORM, GATED_ACTIVATION):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    _libraries.append(loaded)
    return None


def obstacle(native: bool, **_: object) -> str | None:
    """Why a program may not use the kernels, or None. `native`: of its `Target`."""
    return None if native else "no kernels are built for this machine"


def obstacle_in_float32(native: bool, dtype: str) -> str | None:
    """The same where they compute in float32 alone; `dtype`: of what they are given."""
    return obstacle(native) or (None if dtype == "float32" else f"numbers are {dtype}")


def _flags() -> tuple[str, ...]:
    return *_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))


def _key(compiler: str) -> str:
    """Changes with whatever the library depends on, the processor included: a home may be shared."""
    made_by = f"{compiler} {jaxlib.version.__version__} {platform.machine()} {_flags()}"
    digest = hashlib.sha256(made_by.encode())
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_PACKAGE / name).read_bytes())
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        lines = processor.read_text(encoding="utf-8", errors="replace").splitlines()
        digest.update(next((line for line in lines if line.startswith(("flags", "Features"))), "").encode())
    return digest.hexdigest()[:32]


def _build(compiler: str, library: Path) -> str | None:
    """Compile into place, whole or not at all; returns what went wrong."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        include = ("-I", jax.ffi.include_dir(), "-I", str(_PACKAGE))
        command = [
            compiler,
            *_flags(),
            *include,
            *(str(_PACKAGE / name) for name in _SOURCES),
            "-o",
            str(built),
        ]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler}: {error}"
        if process.returncode:
            return f"{compiler} failed: {process.stderr.strip()[-500:]}"
        built.replace(library)
    return None
