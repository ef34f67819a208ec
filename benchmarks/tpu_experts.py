"""What experts cost on a TPU by our grouped MLP, by `jax.lax.ragged_dot` and by JAX's megablox kernel.

    python -m benchmarks.tpu_experts [v6e] [--only mixtral] [--json]

Each is compiled with the TPU's compiler, for the experts of a layer in a stack of several, bfloat16. A line
tells the temporaries (a layer's slice among them, where the compiler copies it), and the cycles
of all tiles if every expert is chosen equally often: for XLA's fusions its own estimates, waits for
memory included, for megablox the executed bundles of its final schedule, which leave waits out.

Needs libtpu: the project's extra compilers-tpu.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bundles import read_bundles

NUM_LAYERS = 4
GMM_TILE = 512
"""Of megablox, inputs and outputs of a tile, and rows at the most."""
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
KINDS = ("ours", "ours in tiles of 16", "ragged_dot", "megablox")


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

    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_static_gaps=true"
        os.environ.update(TPU_ENVIRONMENT, LIBTPU_INIT_ARGS=flags)
        import jax
        from jax.experimental import topologies

        experts = MODELS[model]
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
        device = topology.devices[0]
        mesh = jax.sharding.Mesh([device], ("device",))
        tile = tile_rows(model, rows, kind, device)
        with jax.default_device(device), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = (
                jax.jit(program(experts, rows, kind, tile)).lower(*operands(experts, rows, device)).compile()
            )
        memory = compiled.memory_analysis()
        assert memory is not None
        if kind == "megablox":
            cycles = _gmm_cycles(experts, rows, Path(folder))
        else:
            per_expert = rows * experts.per_token // experts.num_experts
            tiles = experts.num_experts * -(-per_expert // tile) if kind.startswith("ours") else 1
            cycles = tiles * loop_cycles(str(compiled.as_text())) if kind.startswith("ours") else None
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
    """Of ours as the engine takes it, or 16; of megablox."""
    from jaxserve.model.experts import expert_tile_rows
    from jaxserve.planning.models import find_model
    from pallas_kernels.dispatch import Target

    if kind == "ours":
        return expert_tile_rows(rows, find_model(model), Target.of(device), exact=False)
    return 16 if kind.startswith("ours") else min(GMM_TILE, rows * MODELS[model].per_token)


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
        product = _ragged_dot if kind == "ragged_dot" else _gmm
        gate_up = gate_up.reshape(gate_up.shape[0], -1, experts.hidden)
        hidden = product(experts, tile, x[row], gate_up, sizes, layer).reshape(choices, 2, experts.width)
        out = product(experts, tile, activate(hidden), down, sizes, layer) * weight[:, None]
        return jnp.zeros((rows, experts.hidden), jnp.float32).at[row].add(out)

    return ours if kind.startswith("ours") else peer


def _ragged_dot(experts: Experts, _: int, x: Any, stack: Any, sizes: Any, layer: Any) -> Any:
    import jax
    import jax.numpy as jnp

    own = jax.lax.dynamic_slice_in_dim(stack, layer * experts.num_experts, experts.num_experts)
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, own, sizes, numbers, preferred_element_type=jnp.float32)


def _gmm(experts: Experts, tile: int, x: Any, stack: Any, sizes: Any, layer: Any) -> Any:
    """By the whole stack, in which the other layers' experts have no rows."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    whole = jnp.zeros((stack.shape[0],), jnp.int32)
    whole = jax.lax.dynamic_update_slice_in_dim(whole, sizes, layer * experts.num_experts, 0)
    tiling = tile, _gmm_tile(stack.shape[2]), _gmm_tile(stack.shape[1])
    return gmm(x, stack, whole, jnp.float32, tiling, transpose_rhs=True)


def _gmm_tile(size: int) -> int:
    return next(tile for tile in (GMM_TILE, 256, 128) if size % tile == 0)


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


def _gmm_cycles(experts: Experts, rows: int, folder: Path) -> int:
    """Executed bundles of both products."""
    tile = min(GMM_TILE, rows * experts.per_token)
    # A tile of rows that several experts share is multiplied once for each.
    row_tiles = -(-rows * experts.per_token // tile) + experts.num_experts - 1
    names = sorted({path.name.split("-")[1] for path in folder.glob("*gmm*-final_bundles.txt")})
    total = 0
    for name, (inputs, outputs) in zip(
        names, ((experts.hidden, 2 * experts.width), (experts.width, experts.hidden)), strict=True
    ):
        steps = row_tiles * (inputs // _gmm_tile(inputs)) * (outputs // _gmm_tile(outputs))
        total += steps * sum(bundle.depth > 0 for bundle in read_bundles(folder, name))
    return total


if __name__ == "__main__":
    main()
