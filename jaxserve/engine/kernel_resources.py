"""What GPU kernels take of a multiprocessor, read from what their compiler leaves behind.

Mosaic GPU writes down, where MOSAIC_GPU_DUMP_TO says, what ptxas reports of each kernel and the launch that
was compiled, from JAX 0.10.2 to 0.12. XLA's own fusions are not told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MULTIPROCESSOR_REGISTERS, MULTIPROCESSOR_BYTES, MULTIPROCESSOR_THREADS = 65536, 233472, 2048
"""Of compute capability 9.0 (CUDA programming guide, technical specifications)."""
RESERVED_BYTES = 1024
"""Of shared memory, for each thread block."""

_LAUNCH = re.compile(
    r"blocks\([^)]*\) in \(([^)]*)\) threads\([^)]*\) in \(([^)]*)\) dynamic_shared_memory_size %c(\d+)_i32"
)
_CONSTANT = re.compile(r"= %c(\d+)")
_NOISE = ("nvdisasm", "=== Source Location Trace", "dump.cc")
"""In what is written besides: without a disassembler there is no SASS, which is not read."""


@dataclass(frozen=True)
class KernelResources:
    """Of one kernel, as compiled."""

    name: str
    registers: int
    """Of a thread when it starts; warpgroups may then pass some to one another."""
    spilled_bytes: int
    """That a thread stores for want of registers."""
    stack_bytes: int
    """Of a thread."""
    shared_bytes: int
    """Of a thread block."""
    num_threads: int
    """Of a thread block."""
    num_blocks: int

    @property
    def blocks_at_once(self) -> int:
        """Thread blocks that a multiprocessor has room for."""
        return min(
            MULTIPROCESSOR_REGISTERS // (self.registers * self.num_threads),
            MULTIPROCESSOR_BYTES // (self.shared_bytes + RESERVED_BYTES),
            MULTIPROCESSOR_THREADS // self.num_threads,
        )

    def as_json(self) -> dict[str, int | str]:
        """Its fields, and how many thread blocks there is room for."""
        return dataclasses.asdict(self) | {"blocks_at_once": self.blocks_at_once}


def kernel_table(kernels: Iterable[KernelResources]) -> list[str]:
    """A line for each different set of resources, however many kernels have it, under a heading."""
    lines = ["kernel              threads  registers  spilled  stack  shared, KiB  blocks at once"]
    seen: set[str] = set()
    for kernel in sorted(kernels, key=str):
        line = (
            f"{kernel.name:18}  {kernel.num_threads:7}  {kernel.registers:9}  {kernel.spilled_bytes:7}  "
            f"{kernel.stack_bytes:5}  {kernel.shared_bytes / 1024:11.1f}  {kernel.blocks_at_once:14}"
        )
        if line not in seen:
            seen.add(line)
            lines.append(line)
    return lines


@contextlib.contextmanager
def kernels_recorded() -> Iterator[Callable[[], list[KernelResources]]]:
    """Yields what tells, afterwards, of the different kernels that this process compiled inside, by name.

    Raises ValueError, naming the file, where a compiler's report is in no form that is known.
    """
    found: list[KernelResources] = []
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    with tempfile.TemporaryDirectory() as folder, _without_noise():
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            yield lambda: found
        finally:
            os.environ.pop("MOSAIC_GPU_DUMP_TO")
            if before is not None:
                os.environ["MOSAIC_GPU_DUMP_TO"] = before
        reports = Path(folder).glob("*.ptxas")
        found.extend(sorted({_read(report) for report in reports}, key=str))


def _read(report: Path) -> KernelResources:
    text = report.read_text()
    launches = _LAUNCH.findall(report.with_suffix(".mlir-passes.log").read_text())
    numbers = [
        re.search(pattern, text)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame")
    ]
    if not launches or None in numbers:
        raise ValueError(
            f"{report.name}: neither registers nor launch of a kernel are told in {text[:300]!r}"
        )
    # Of all passes the last one, which is what was compiled.
    blocks, threads, shared_bytes = launches[-1]
    registers, spilled, stack = (int(number[1]) for number in numbers if number)
    name = report.stem.rpartition("_")[0]
    return KernelResources(
        name, registers, spilled, stack, int(shared_bytes), _product(threads), _product(blocks)
    )


def _product(launch: str) -> int:
    product = 1
    for number in _CONSTANT.findall(launch):
        product *= int(number)
    return product


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Keep from standard error what tells of files that are not read."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
            told = (line for line in lines if line.strip() and not any(part in line for part in _NOISE))
            sys.stderr.write("".join(told))
