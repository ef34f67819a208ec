"""What experts cost on a TPU by our grouped MLP and by `jax.lax.ragged_dot`.

    python -m benchmarks.tpu_experts [v6e] [--only mixtral] [--json]

Each is compiled with the TPU's compiler, for the experts of a layer in a stack of several, bfloat16. A line
tells the temporaries, a layer's slice among them where the compiler copies it, and of ours the cycles of all
tiles if every expert is chosen equally often, by XLA's own estimates, waits for memory included. Of
`ragged_dot` XLA estimates nothing, and what it copies decides.

Needs libtpu: the project's extra compilers-tpu.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

NUM_LAYERS = 4
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


@dataclass(frozen=True)
class Experts:
    """Of one layer."""

    hidden: int
    width: int
    num_experts: int
    per_token: int


MODELS = {"mixtral-8x7b": Experts(4096, 14336, 8, 2), "qwen3-30b-a3b": Experts(2048, 768, 128, 8)}
ROWS = (128, 2048)
KINDS = ("ours", "ours in tiles of 16", "ragged_dot")


def main() -> None:
    """Read the command line; compile each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_experts", description=__doc__)
    parser.add_argument("chips", nargs="*", metavar="chip", default=["v6e"], help=", ".join(TOPOLOGIES))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        chip, model, rows, kind = arguments.one
        print(json.dumps(measure(chip, model, int(rows), kind)))
        return
    for chip in arguments.chips:
        if chip not in TOPOLOGIES:
            parser.error(f"unknown chip {chip!r}: choose from {', '.join(TOPOLOGIES)}")
        for case in (
            (model, rows, kind)
            for model in MODELS
            for rows in ROWS
            for kind in KINDS
            if arguments.only in f"{model} x {rows} {kind}"
        ):
            measured = measure_apart(chip, *case)
            print(json.dumps(measured) if arguments.json else table_line(measured), flush=True)


def measure_apart(chip: str, model: str, rows: int, kind: str) -> dict[str, Any]:
    """In a process of its own: the compiler reads its settings once."""
    command = [sys.executable, "-m", "benchmarks.tpu_experts", "--one", chip, model, str(rows), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} for {model} on {chip}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table_line(measured: dict[str, Any]) -> str:
    """One case in words."""
    cycles = f"{measured['cycles'] / 1e6:.2f} M cycles" if measured["cycles"] else "cycles not told"
    return (
        f"{measured['chip']:4} {measured['model']:14} x {measured['rows']:4}  {measured['kind']:20} "
        f"temporaries {measured['temporary_bytes'] / 2**20:8.1f} MiB, {cycles}"
    )


def measure(chip: str, model: str, rows: int, kind: str) -> dict[str, Any]:
    """Compile one in this process, which must not have imported jax yet."""
    from benchmarks.tpu_schedule import TPU_ENVIRONMENT

    os.environ.update(TPU_ENVIRONMENT)
    import jax
    from jax.experimental import topologies

    experts = MODELS[model]
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    device = topology.devices[0]
    tile = tile_rows(model, rows, kind, device)
    compiled = jax.jit(program(experts, rows, kind, tile)).lower(*operands(experts, rows, device)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    cycles = None
    if tile:
        per_expert = -(-rows * experts.per_token // experts.num_experts)
        cycles = experts.num_experts * -(-per_expert // tile) * loop_cycles(str(compiled.as_text()))
    return {
        "chip": chip,
        "model": model,
        "rows": rows,
        "kind": kind,
        "tile_rows": tile,
        "temporary_bytes": memory.temp_size_in_bytes,
        "cycles": cycles,
    }


def tile_rows(model: str, rows: int, kind: str, device: Any) -> int:
    """Of ours as the engine takes it, or 16; 0 for the peer, which has none."""
    from jaxserve.model.experts import expert_tile_rows
    from jaxserve.planning.models import find_model
    from pallas_kernels.dispatch import Target

    if kind == "ours":
        return expert_tile_rows(rows, find_model(model), Target.of(device), exact=False)
    return 16 if kind.startswith("ours") else 0


def operands(experts: Experts, rows: int, device: Any) -> list[Any]:
    """Shapes of rows, choices, their weights, both stacks, choices of each expert, the layer."""
    import jax
    import jax.numpy as jnp

    placed = jax.sharding.SingleDeviceSharding(device)
    groups, choices = NUM_LAYERS * experts.num_experts, rows * experts.per_token
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
        for shape, dtype in (
            ((rows, experts.hidden), jnp.bfloat16),
            ((choices,), jnp.int32),
            ((choices,), jnp.float32),
            ((groups, 2, experts.width, experts.hidden), jnp.bfloat16),
            ((groups, experts.hidden, experts.width), jnp.bfloat16),
            ((experts.num_experts,), jnp.int32),
            ((), jnp.int32),
        )
    ]


def program(experts: Experts, rows: int, kind: str, tile: int) -> Callable[..., Any]:
    """A layer's experts by one of KINDS, of `operands`."""
    import jax
    import jax.numpy as jnp

    choices = rows * experts.per_token

    def activate(hidden: Any) -> Any:
        gate = hidden[:, 0].astype(jnp.float32)
        return (jax.nn.silu(gate) * hidden[:, 1]).astype(jnp.bfloat16)

    def ours(x: Any, row: Any, weight: Any, gate_up: Any, down: Any, sizes: Any, layer: Any) -> Any:
        from jaxserve.model.layers import product_flat
        from pallas_kernels.grouped_mlp import grouped_mlp

        first = layer * experts.num_experts
        settings = {"multiply": product_flat, "activate": activate, "tile_rows": tile}
        return grouped_mlp(x, row, weight, gate_up, down, sizes, first, **settings)

    def peer(x: Any, row: Any, weight: Any, gate_up: Any, down: Any, sizes: Any, layer: Any) -> Any:
        gate_up = gate_up.reshape(gate_up.shape[0], -1, experts.hidden)
        hidden = _ragged_dot(experts, x[row], gate_up, sizes, layer).reshape(choices, 2, experts.width)
        out = _ragged_dot(experts, activate(hidden), down, sizes, layer) * weight[:, None]
        return jnp.zeros((rows, experts.hidden), jnp.float32).at[row].add(out)

    return ours if kind.startswith("ours") else peer


def _ragged_dot(experts: Experts, x: Any, stack: Any, sizes: Any, layer: Any) -> Any:
    import jax
    import jax.numpy as jnp

    own = jax.lax.dynamic_slice_in_dim(stack, layer * experts.num_experts, experts.num_experts)
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, own, sizes, numbers, preferred_element_type=jnp.float32)


def loop_cycles(hlo: str) -> int:
    """What XLA takes one iteration of a program's loop to cost, by its own estimates of what is in it."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", hlo))
    return sum(
        int(cycles)
        for name, line in _lines(hlo)
        if name in bodies
        for cycles in re.findall(r'estimated_cycles":"(\d+)"', line)
    )


def _lines(hlo: str) -> Iterator[tuple[str, str]]:
    """Each line with its computation."""
    name = ""
    for line in hlo.splitlines():
        if header := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = header[1]
        yield name, line


if __name__ == "__main__":
    main()
