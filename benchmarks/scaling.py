"""How a model spreads over devices: seconds to compile and to step, and what sums between chips cost.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --devices 1 2 4 8 --json scaling.json

The devices are virtual ones that share this machine's cores: what they have in common shows what spreading a
model costs the compiler and the host, not what it gains. What the sums between devices take on real chips is
modelled: the exchanges of `jaxserve compile`, the vendor's bandwidth of links, an estimate for latency.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.plan import SamplingParams, SequencePlan, SlotLoad, StepPlan, StepShape
from jaxserve.planning.chips import find_chip
from jaxserve.planning.cost_model import CostModel
from jaxserve.planning.footprint import Footprint
from jaxserve.planning.models import find_model

MODEL = ModelConfig(
    family="llama",
    vocab_size=32768,
    hidden_size=512,
    intermediate_size=1536,
    num_heads=16,
    num_kv_heads=8,
    head_size=64,
    layers=(LayerKind(),) * 8,
    max_position=512,
)
SLOTS, CHUNK, REPEATS = 8, 128, 12
MODELLED = (
    ("llama-3.1-70b", "v6e", 8),
    ("llama-3.1-70b", "v5p", 8),
    ("llama-3.1-70b", "h200", 8),
    ("llama-3.1-8b", "v5e", 4),
)
CONTEXT = 1024


def main() -> None:
    """Read the command line, run each number of devices in a process of its own, print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 2, 4, 8], help="numbers of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own is not None:
        print(json.dumps(_measured(arguments.own)))
        return
    from benchmarks.machine import describe

    print(describe())
    print("devices  compile    decode, 8 rows           prefill, 128 rows")
    measured = [_in_a_process(number) for number in arguments.devices]
    for row in measured:
        print(
            f"{row['devices']:7}  {row['compile_seconds']:5.1f} s  {row['decode_seconds'] * 1e3:7.2f} ms "
            f"{SLOTS / row['decode_seconds']:7.0f} tok/s  {row['chunk_seconds'] * 1e3:7.1f} ms "
            f"{CHUNK / row['chunk_seconds']:7.0f} tok/s"
        )
    modelled = list(_modelled())
    print("\nmodelled: sums between devices, of a step      decode, 64 rows  prefill, 1024 rows")
    for row in modelled:
        print(
            f"{row['model']:16} tensor={row['devices']} on {row['chip']:17} {row['decode']:15.1%} "
            f"{row['chunk']:19.1%}"
        )
    if arguments.json:
        content = {"machine": describe(), "measured": measured, "modelled": modelled}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def _in_a_process(num_devices: int) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    command = [sys.executable, "-m", "benchmarks.scaling", "--own", str(num_devices)]
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    process = subprocess.run(
        command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(process.stdout)


def _measured(num_devices: int) -> dict[str, Any]:
    """Of this process's devices: seconds to compile, and medians of full steps."""
    from jaxserve.engine.build import EngineOptions, layer_loop_for, local_target, resolve_here
    from jaxserve.engine.engine import DeviceEngine
    from jaxserve.engine.parameters import place_parameters
    from jaxserve.engine.programs import compile_programs
    from sharding import make_mesh

    options = EngineOptions(
        num_slots=SLOTS, max_chunk=CHUNK, max_model_len=512, num_pages=2**31, mesh=f"tensor={num_devices}"
    )
    config = resolve_here(MODEL, options)
    layer_loop = layer_loop_for("cpu")
    started = time.monotonic()
    programs = compile_programs(config, layer_loop, target=local_target())
    compile_seconds = time.monotonic() - started
    params = place_parameters(_random_parameters(), config.model, layer_loop, make_mesh(config.mesh))
    engine = DeviceEngine(config, params, programs)
    decode, chunk = engine.limits.decode_shapes[-1], engine.limits.chunk_shapes[-1]
    return {
        "devices": num_devices,
        "compile_seconds": compile_seconds,
        "programs": len(programs.steps),
        "decode_seconds": _seconds(engine, decode, SLOTS, 1),
        "chunk_seconds": _seconds(engine, chunk, 1, CHUNK),
    }


def _seconds(engine: Any, shape: StepShape, num_sequences: int, rows: int) -> float:
    """The median of several steps from dispatch to result, each of sequences that begin."""
    plan = StepPlan.of([SequencePlan(slot, rows) for slot in range(num_sequences)], (), shape)
    times: list[float] = []
    for _ in range(REPEATS):
        for slot in range(num_sequences):
            engine.load_slot(_load(slot, rows))
        started = time.perf_counter()
        engine.collect(engine.dispatch(plan))
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _load(slot: int, rows: int) -> SlotLoad:
    pages = tuple(range(1 + slot * 32, 33 + slot * 32))
    return SlotLoad(
        slot=slot,
        tokens=[1] * rows,
        num_prompt_tokens=rows,
        num_computed=0,
        pages=(pages,),
        params=SamplingParams(temperature=0, max_tokens=8),
        seed=0,
        sample_index=0,
    )


def _random_parameters() -> Iterator[tuple[str, np.ndarray]]:
    from jaxserve.model.parameters import model_parameters

    random = np.random.default_rng(0)
    for name, info in model_parameters(MODEL):
        yield name, random.standard_normal(info.shape, np.float32) * np.float32(0.05)


def _modelled() -> Iterator[dict[str, Any]]:
    """The share of sums between devices in a step's time."""
    for name, chip, number in MODELLED:
        cost = CostModel(Footprint.of(find_model(name)), find_chip(chip), num_chips=number)
        steps = {
            "decode": (StepShape(64, 64, 64, decode=True), np.full(64, CONTEXT), np.ones(64, np.int64)),
            "chunk": (StepShape(1024, 1, 1), np.zeros(1, np.int64), np.full(1, 1024)),
        }
        shares = {}
        for kind, step in steps.items():
            parts = cost.cost(*step)
            shares[kind] = parts.collectives / parts.seconds
        yield {"model": name, "chip": chip, "devices": number, **shares}


if __name__ == "__main__":
    main()
