"""What chips can do at best: vendors' figures, each with its source, and one CPU that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator, or one machine without any."""

    name: str
    flops: Mapping[str, float]
    """Peak operations a second (a multiply-add is two) by the format of the operands: float32, bfloat16,
    int8, float8. Dense, no sparsity."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes a second."""
    link_bandwidth: float
    """Bytes a second that a chip sends to its neighbours, one direction, all links together; 0 where chips
    of the kind are not linked."""
    step_overhead: float
    """Seconds that a step costs beside its arithmetic: launch, small operations, the result's way to the
    host. An estimate, where the source does not say otherwise."""
    source: str

    @property
    def is_cpu(self) -> bool:
        """Whether it is a machine without accelerators."""
        return self.name.startswith("cpu")

    def peak(self, operand_format: str) -> float:
        """Operations a second on operands of a format, or of the next wider one with a figure."""
        if operand_format not in _WIDER:
            raise ValueError(f"operand format {operand_format!r} is not one of {', '.join(_WIDER)}")
        for name in _WIDER[operand_format]:
            if name in self.flops:
                return self.flops[name]
        raise ValueError(f"chip {self.name} has no peak for {operand_format}; it has {', '.join(self.flops)}")


_WIDER = {
    "int8": ("int8", "bfloat16", "float32"),
    "float8": ("float8", "bfloat16", "float32"),
    "int4": ("bfloat16", "float32"),  # widened on the way into the multiplier
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
}

_GB = 1e9
_TERA = 1e12
_HOPPER_FLOPS = {"bfloat16": 989.4 * _TERA, "float8": 1978.9 * _TERA, "int8": 1978.9 * _TERA}

CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            flops={"bfloat16": 197 * _TERA, "int8": 393 * _TERA},
            memory_bytes=16 * _GB,
            memory_bandwidth=819 * _GB,
            link_bandwidth=200 * _GB,
            step_overhead=100e-6,
            source="docs.cloud.google.com/tpu/docs/v5e: 197 TFLOPs, 393 TOPs, 16 GB, 819 GBps, "
            "ICI 400 GBps in both directions",
        ),
        Chip(
            name="v5p",
            flops={"bfloat16": 459 * _TERA, "int8": 918 * _TERA},
            memory_bytes=95 * _GB,
            memory_bandwidth=2765 * _GB,
            link_bandwidth=600 * _GB,
            step_overhead=100e-6,
            source="docs.cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 95 GB, 2765 GBps, ICI 1200 GBps in both "
            "directions; int8 918 TOPs from the announcement of December 2023",
        ),
        Chip(
            name="v6e",
            flops={"bfloat16": 918 * _TERA, "int8": 1836 * _TERA},
            memory_bytes=32 * _GB,
            memory_bandwidth=1600 * _GB,
            link_bandwidth=400 * _GB,
            step_overhead=100e-6,
            source="docs.cloud.google.com/tpu/docs/v6e: 918 TFLOPs, 1836 TOPs, 32 GB, 1600 GBps, "
            "ICI 800 GBps in both directions",
        ),
        Chip(
            name="h100",
            flops=_HOPPER_FLOPS,
            memory_bytes=80 * _GB,
            memory_bandwidth=3350 * _GB,
            link_bandwidth=450 * _GB,
            step_overhead=100e-6,
            source="NVIDIA H100 SXM data sheet and Hopper white paper: 989.4 TFLOPS bf16, 1978.9 fp8 and "
            "int8, dense; 80 GB, 3.35 TB/s, NVLink 900 GB/s in both directions",
        ),
        Chip(
            name="h200",
            flops=_HOPPER_FLOPS,
            memory_bytes=141 * _GB,
            memory_bandwidth=4800 * _GB,
            link_bandwidth=450 * _GB,
            step_overhead=100e-6,
            source="NVIDIA H200 SXM data sheet: arithmetic as H100; 141 GB, 4.8 TB/s, "
            "NVLink 900 GB/s in both directions",
        ),
        Chip(
            name="cpu-2-cores",
            flops={"float32": 173e9},
            memory_bytes=8 * _GB,
            memory_bandwidth=35.1 * _GB,
            link_bandwidth=0.0,
            step_overhead=2.5e-3,
            source="2 cores of an AMD EPYC with AVX2, measured by benchmarks.offline (SmolLM2-135M, float32; "
            "benchmarks/results/offline-cpu-2-cores.json): read bandwidth 35.1 GB/s; 454 prompt tokens a "
            "second are 104 GFLOP/s, 60 % of 2 x 32 operations at 2.7 GHz; the overhead is what one-row "
            "decoding leaves. Steps of a few rows are slower than this: 16 took 2.4 times as long",
        ),
    )
}


def find_chip(name: str) -> Chip:
    """The chip of that name. Raises ValueError, listing the names, if there is none."""
    if name not in CHIPS:
        raise ValueError(f"chip {name!r} is not one of {', '.join(CHIPS)}")
    return CHIPS[name]
