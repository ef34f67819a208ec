"""How a model spreads over devices: seconds to compile and to step, and what exchanges between chips cost.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --models experts --json scaling.json
    python -m benchmarks.scaling --models dense --meshes pipe=4 --slots 32

The devices are virtual: all of them share this machine's cores, so more of them make no step faster. What is
seen is overhead: what spreading a model costs the compiler, the host, and exchanges in memory. What exchanges
take of a step on real chips is modelled: see `benchmarks.communication`. Stages decode both ways: in groups,
of which a step takes another one on in each stage, and all sequences through one stage after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.plan import SamplingParams, SequencePlan, SlotLoad, StepPlan, StepShape
from sharding import mesh_size, parse_mesh

DENSE = ModelConfig(
    family="llama",
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1536,
    num_heads=16,
    num_kv_heads=8,
    head_size=64,
    layers=(LayerKind(),) * 8,
    max_position=512,
)
MODELS: Mapping[str, ModelConfig] = {
    "dense": DENSE,
    "experts": dataclasses.replace(
        DENSE,
        layers=(LayerKind(experts=True),) * 8,
        num_experts=8,
        experts_per_token=2,
        expert_intermediate_size=512,
    ),
}
AXES = {"dense": ("tensor", "pipe", "data"), "experts": ("expert", "data")}
"""Of each model, along which it is spread."""
CHUNK, REPEATS, ROUNDS = 128, 12, 24


def main() -> None:
    """Read the command line, run each mesh in a process of its own, print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="which to spread")
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 2, 4, 8], help="numbers of them")
    parser.add_argument("--meshes", nargs="*", help="these instead")
    parser.add_argument("--slots", type=int, default=8, help="sequences that decode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--own", nargs=3, metavar=("MODEL", "MESH", "GROUPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own is not None:
        name, mesh, groups = arguments.own
        print(json.dumps({"model": name} | measure(MODELS[name], mesh, int(groups), arguments.slots)))
        return
    from benchmarks.communication import shares
    from benchmarks.machine import describe

    print(describe())
    measured: list[dict[str, Any]] = []
    print(f"{'':18} groups  compile {'':13} decode, {arguments.slots} rows {'':13} prefill, {CHUNK} rows")
    for name in arguments.models:
        for mesh in arguments.meshes or meshes(AXES[name], arguments.devices):
            stages = dict(parse_mesh(mesh)).get("pipe", 1)
            for groups in sorted({1, stages}):
                measured.append(_in_a_process(name, mesh, groups, arguments.slots))
                print(_line(measured[-1]), flush=True)
    modelled = list(shares())
    print("\nmodelled: exchanges' part of a step, without and with their latency")
    for row in modelled:
        kind = "decode" if row["decode"] else "chunk"
        print(
            f"{row['model']:16} {row['target']:8} {row['mesh']:16} {kind:6} {row['rows']:5} rows  "
            f"{row['least']:6.1%} {row['most']:6.1%}"
        )
    if arguments.json:
        content = {"machine": describe(), "measured": measured, "modelled": modelled}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def meshes(axes: tuple[str, ...], sizes: list[int]) -> list[str]:
    """One device, which is the same along any axis, and each axis in each of the other sizes."""
    alone = [f"{axes[0]}=1"] if 1 in sizes else []
    return alone + [f"{axis}={size}" for axis in axes for size in sizes if size > 1]


def measure(model: ModelConfig, mesh_name: str, groups: int, slots: int) -> dict[str, Any]:
    """Of this process's devices: seconds to compile two steps, their exchanges, and how fast they are."""
    from jaxserve.engine.build import layer_loop_for, local_target, resolve_here
    from jaxserve.engine.engine import DeviceEngine
    from jaxserve.engine.options import EngineOptions
    from jaxserve.engine.parameters import place_parameters
    from jaxserve.engine.programs import compile_programs
    from sharding import make_mesh

    options = EngineOptions(
        num_slots=slots,
        max_chunk=CHUNK,
        max_model_len=512,
        num_pages=2**31,
        mesh=mesh_name,
        decode_groups=groups,
    )
    config = resolve_here(model, options)
    config = dataclasses.replace(config, decode_rows=(config.slots_of_group,), chunk_rows=(CHUNK,))
    target = local_target()
    layer_loop = layer_loop_for(target, spread=bool(config.mesh))
    started = time.monotonic()
    programs = compile_programs(config, layer_loop, target=target)
    compile_seconds = time.monotonic() - started
    mesh = make_mesh(config.mesh)
    params = place_parameters(_random_parameters(model), config.model, layer_loop, mesh)
    engine = DeviceEngine(config, params, programs)
    (decode,), (chunk,) = engine.limits.decode_shapes, engine.limits.chunk_shapes
    return {
        "mesh": mesh_name,
        "devices": mesh_size(config.mesh),
        "groups": groups,
        "compile_seconds": compile_seconds,
        "decode": _told(programs.steps[decode].run, slots, _decode_seconds(engine, decode, slots)),
        "prefill": _told(
            programs.steps[chunk].run, CHUNK * config.num_replicas, _prefill_seconds(engine, chunk)
        ),
    }


def _told(program: Any, num_tokens: int, seconds: float) -> dict[str, Any]:
    """Of a program, and of so many tokens in that time."""
    from jaxserve.engine.collectives import collectives

    found = collectives(program.as_text() or "")
    always = {one: times for one, times in found.items() if not one.conditional}
    return {
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "exchanges": sum(always.values()),
        "sent_bytes": int(sum(one.moved_bytes * times for one, times in always.items())),
    }


def _prefill_seconds(engine: Any, shape: StepShape) -> float:
    """The median of several steps from dispatch to result, each of a prompt that begins in every replica."""
    of_each = engine.limits.num_slots // engine.limits.num_replicas
    slots = range(0, engine.limits.num_slots, of_each)
    plan = StepPlan.of([SequencePlan(slot, CHUNK) for slot in slots], (), shape)
    times: list[float] = []
    for _ in range(REPEATS):
        for slot in slots:
            engine.load_slot(_load(slot, 0, CHUNK))
        started = time.perf_counter()
        engine.collect(engine.dispatch(plan))
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _decode_seconds(engine: Any, shape: StepShape, slots: int) -> float:
    """The median time in which every sequence moves on by a token, each step being waited for when the next
    one has been started."""
    groups = engine.limits.decode_groups
    of_each = slots // engine.limits.num_replicas
    for slot in range(slots):
        engine.load_slot(_load(slot, slot % of_each, 1))
    plans = [
        StepPlan.of([SequencePlan(slot, 1) for slot in range(group, slots, groups)], (), shape)
        for group in range(groups)
    ]
    handles: deque[Any] = deque()
    ends: list[float] = []
    for _ in range(ROUNDS):
        for plan in plans:
            handles.append(engine.dispatch(plan))
            if len(handles) > groups:
                engine.collect(handles.popleft())
        ends.append(time.perf_counter())
    while handles:
        engine.collect(handles.popleft())
    return statistics.median(end - start for start, end in itertools.pairwise(ends[1:]))


def _load(slot: int, number: int, rows: int) -> SlotLoad:
    """`number`: of the slot in its replica, which has pages of its own."""
    pages = tuple(range(1 + number * 32, 33 + number * 32))
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


def _random_parameters(model: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    from jaxserve.model.parameters import model_parameters

    random = np.random.default_rng(0)
    for name, info in model_parameters(model):
        yield name, random.standard_normal(info.shape, np.float32) * np.float32(0.05)


def _in_a_process(name: str, mesh: str, groups: int, slots: int) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count={mesh_size(parse_mesh(mesh))}"
    command = [sys.executable, "-m", "benchmarks.scaling", "--own", name, mesh, str(groups)]
    command += ["--slots", str(slots)]
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    process = subprocess.run(
        command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(process.stdout)


def _line(row: Mapping[str, Any]) -> str:
    steps = (
        f"{step['seconds'] * 1e3:7.1f} ms {step['tokens_per_second']:6.0f} tok/s {step['exchanges']:4} exch."
        for step in (row["decode"], row["prefill"])
    )
    head = f"{row['model']:8} {row['mesh']:15} {row['groups']:4} {row['compile_seconds']:6.1f} s"
    return f"{head}  {'  '.join(steps)}"


if __name__ == "__main__":
    main()
