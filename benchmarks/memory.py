"""Is the memory what the plan says? `python -m benchmarks.memory [MODEL] [--json FILE]`

For each recipe, in a process of its own: what the weights take once they are loaded, what the KV pool takes,
and the most that was resident on the way, beside what `jaxserve plan` counts (parameters x bits / 8, scales,
pages with theirs). Resident memory is read from /proc (Linux). Each process loads the model four times and
keeps all: the first time brings the programs that round, the others count. Exit status 1 if weights or pool
are further from the plan than the tolerance, or if loading held more than two of the largest tensor, as
float32, beside the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.machine import describe
from jaxserve.config import KvFormat, ModelConfig
from jaxserve.model.parameters import model_parameters
from jaxserve.planning.footprint import Footprint
from jaxserve.planning.precision import PRECISIONS, Precision
from jaxserve.weights import open_any_checkpoint, resolve_model

CASES: tuple[tuple[str, KvFormat], ...] = (
    ("f32", "float32"),
    ("bf16", "bfloat16"),
    ("int8", "float32"),
    ("int8", "int8"),
    ("int8-weight-only", "float32"),
    ("fp8", "float32"),
    ("int4", "float32"),
)
"""Recipes of weights, and formats of pages."""
MIB = 2**20
TOLERANCE = 0.01
SLACK = 8 * MIB
"""Bytes beside the tolerance: what the allocator and the runtime keep of their own."""
LARGEST_HELD = 2

_PROGRAM = """
import ctypes, gc, json, sys
from pathlib import Path
import jax
from jaxserve.engine.build import configure, load_parameters
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.programs import make_spread_state
from jaxserve.weights import open_any_checkpoint

def resident(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) * 1024

def grown_by(make):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # The peak is what is resident now.
    before = resident("VmRSS")
    made = jax.block_until_ready(make())
    return made, resident("VmRSS") - before, resident("VmHWM") - before

checkpoint = open_any_checkpoint(Path(sys.argv[1]))
recipe, kv_format, num_slots, max_model_len = sys.argv[2:]
sizes = {"num_slots": int(num_slots), "max_model_len": int(max_model_len)}
config = configure(checkpoint, EngineOptions(quantize=recipe, kv_format=kv_format, **sizes))
first, state = jax.block_until_ready((load_parameters(checkpoint, config), make_spread_state(config)))
loads = [grown_by(lambda: load_parameters(checkpoint, config)) for _ in range(3)]
pool, pool_bytes, _ = grown_by(lambda: make_spread_state(config))
print(json.dumps({
    # What another thread frees late is counted by chance, and only ever adds.
    "weights": min(grown for _, grown, _ in loads), "loading": max(peak for *_, peak in loads),
    "pool": pool_bytes,
    "num_pages": config.cache.num_pages, "page_size": config.cache.page_size,
}))
"""


@dataclass(frozen=True)
class Taken:
    """Bytes of one case."""

    recipe: str
    kv_format: KvFormat
    planned_weights: float
    weights: int
    """Resident, once they are loaded."""
    loading: int
    """The most that was resident while they were."""
    planned_pool: float
    pool: int
    """Resident; all else that slots keep is in it."""
    largest: int
    """Of the largest tensor, in float32."""

    @property
    def peak(self) -> int:
        """The most beyond what a process has before it has a model: the pool comes after the weights."""
        return max(self.loading, self.weights + self.pool)

    def faults(self) -> list[str]:
        """What is not as planned."""
        found: list[str] = []
        for name, planned, measured in (
            ("weights", self.planned_weights, self.weights),
            ("pool", self.planned_pool, self.pool),
        ):
            if abs(measured - planned) > TOLERANCE * planned + SLACK:
                found.append(f"{name}: {measured / MIB:.1f} MiB, planned were {planned / MIB:.1f}")
        most = self.planned_weights + LARGEST_HELD * self.largest + SLACK
        if self.loading > most:
            found.append(f"loading held {self.loading / MIB:.1f} MiB; the limit is {most / MIB:.1f}")
        return found


@dataclass
class Report:
    """Everything that one run measured."""

    machine: str
    model: str
    cases: list[Taken] = field(default_factory=list)


def planned_weights(model: ModelConfig, recipe: str) -> float:
    """Bytes of a model's weights, as the planner counts them."""
    plain = {"f32": "float32", "bf16": "bfloat16"}.get(recipe)
    if plain:
        return PRECISIONS[plain].stored_bytes(model, "float32")
    found = Precision(name=recipe, weight_format=recipe, compute_format="float32", recipe=recipe)
    return found.stored_bytes(model, "float32")


def measure(
    path: Path, recipe: str, kv_format: KvFormat, num_slots: int = 8, max_model_len: int = 1024
) -> Taken:
    """One case, in a process that does nothing else. Raises CalledProcessError where that fails."""
    arguments = (str(path), recipe, kv_format, str(num_slots), str(max_model_len))
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    found = json.loads(done.stdout.splitlines()[-1])
    model = open_any_checkpoint(path).config
    footprint = Footprint.of(model)
    pages = zip(model.windows, found["num_pages"], strict=True)
    return Taken(
        recipe=recipe,
        kv_format=kv_format,
        planned_weights=planned_weights(model, recipe),
        weights=found["weights"],
        loading=found["loading"],
        planned_pool=sum(
            count * footprint.page_bytes(kv_format, found["page_size"], window) for window, count in pages
        ),
        pool=found["pool"],
        largest=4 * max(math.prod(info.shape) for _, info in model_parameters(model)),
    )


def print_report(report: Report) -> None:
    print(f"machine    {report.machine}")
    print(f"model      {report.model}; MiB: planned, measured")
    print(f"{'weights':<17}{'KV':<10}{'weights':>16}{'pool':>16}{'peak':>16}")
    for case in report.cases:
        planned = case.planned_weights + case.planned_pool
        pairs = (
            (case.planned_weights, case.weights),
            (case.planned_pool, case.pool),
            (planned, case.peak),
        )
        cells = (f"{plan / MIB:.1f}, {measured / MIB:.1f}" for plan, measured in pairs)
        print(f"{case.recipe:<17}{case.kv_format:<10}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--num-slots", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    path = resolve_model(args.model)
    report = Report(describe(), args.model)
    for recipe, kv_format in CASES:
        report.cases.append(measure(path, recipe, kv_format, args.num_slots, args.max_model_len))
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    faults = [f"{case.recipe}, {case.kv_format}: {fault}" for case in report.cases for fault in case.faults()]
    print("\n".join(faults or ["memory is what the plan says"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
