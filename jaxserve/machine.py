"""On what something runs, or was measured."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host, as far as this process may use it."""

    processor: str
    cores: int
    system: str

    def text(self) -> str:
        return f"{self.processor}, {self.cores} cores, {self.system}"

    @classmethod
    def here(cls) -> Machine:
        return cls(
            processor=processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            system=f"{platform.system()} {platform.machine()}",
        )


def machine_load() -> float:
    """Programs that want a core, over the last minute; 0 where the system does not say it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
