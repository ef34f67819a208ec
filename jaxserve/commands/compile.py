"""`jaxserve compile`: every step of an engine through the compiler of a machine that is not here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, get_args

from jaxserve.commands.options import parse_size, recipe_name
from jaxserve.config import KvFormat
from jaxserve.engine.kernel_resources import KernelResources, kernel_table, kernels_recorded
from jaxserve.quantization import recipe_named

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig, ModelConfig
    from jaxserve.engine.ahead import AheadEngine, StepReport
    from jaxserve.engine.machines import Machine
    from jaxserve.planning.chips import Chip
    from sharding import MeshAxes

GIB = 2**30
DEFAULT_MAX_MODEL_LEN = 16384
DEFAULT_DECODE_ROWS = (8, 32, 128)
DEFAULT_CHUNK_ROWS = (256, 2048)


class Compile:
    name = "compile"
    help = "compile for a TPU or GPU that is not here, and report its memory"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = (
            "Builds every step of the ladder with the real compiler of a TPU or GPU, from a configuration "
            "alone. Needs jaxserve[compilers-tpu] or jaxserve[compilers-gpu]; no device, no weights."
        )
        add = parser.add_argument
        add("model", metavar="MODEL", help="a known model (llama-3.1-8b) or a folder with a config.json")
        add("--target", required=True, metavar="NAME", help="chip and number, as v5e-4, v5p-4, v6e-8, h200")
        add("--mesh", metavar="AXES", help="as tensor=4,pipe=2 (default: all devices along tensor)")
        add("--tensor", type=int, metavar="N", help="the same as --mesh tensor=N")
        add("--slots", type=int, default=DEFAULT_DECODE_ROWS[-1], metavar="N", help="sequences at once")
        add("--max-model-len", type=int, metavar="N", help="longest sequence (default: up to 16384)")
        add("--kv-memory", type=parse_size, metavar="SIZE", help="of the pool, all devices together")
        add("--kv-format", "--kv", default="auto", choices=["auto", *get_args(KvFormat)])
        add(
            "--quantize",
            type=recipe_name,
            metavar="RECIPE",
            help="formats of weights (default: bfloat16)",
        )
        add("--page-size", type=int, metavar="N", help="tokens on a page (default 64)")
        add("--decode-rows", type=_ladder, default=DEFAULT_DECODE_ROWS, metavar="N,N", help="decode steps")
        add("--chunk-rows", type=_ladder, default=DEFAULT_CHUNK_ROWS, metavar="N,N", help="chunk steps")
        add("--kernels", action="store_true", help="of a GPU: what each kernel takes of a multiprocessor")
        add("--json", action="store_true", help="a line of JSON for each step")

    def run(self, args: argparse.Namespace) -> int:
        from jaxserve.engine.machines import COMPILER_ENVIRONMENT, Machine
        from jaxserve.planning.chips import find_chip
        from jaxserve.planning.models import find_model

        machine = Machine.parse(args.target)
        if args.kernels and machine.platform != "gpu":
            raise ValueError(
                f"--kernels with target {args.target!r}: kernels of a TPU have no registers to run out of; "
                "python -m benchmarks.tpu_schedule reads their schedules"
            )
        os.environ.update(COMPILER_ENVIRONMENT)
        axes = _axes(args, machine.num_devices)
        machine.require_compiler()
        return self._compile(args, machine, axes, find_model(args.model), find_chip(machine.chip))

    def _compile(
        self, args: argparse.Namespace, machine: Machine, axes: MeshAxes, model: ModelConfig, chip: Chip
    ) -> int:
        from jaxserve.engine.ahead import prepare_ahead
        from jaxserve.engine.mesh import slots_of_each
        from jaxserve.engine.options import EngineOptions

        options = EngineOptions(
            max_model_len=args.max_model_len or min(model.max_position, DEFAULT_MAX_MODEL_LEN),
            num_slots=args.slots,
            quantize=args.quantize,
            kv_format=args.kv_format,
            page_size=args.page_size,
            kv_memory=args.kv_memory,
        )
        slots = slots_of_each(args.slots, axes)
        decode_rows = tuple(sorted({min(rows, slots) for rows in args.decode_rows} | {slots}))
        with machine.mesh(axes) as mesh:
            engine = prepare_ahead(
                model, options, mesh, machine.platform, chip.memory_bytes, decode_rows, args.chunk_rows
            )
            if not args.json:
                _print_head(engine, chip)
            reports: list[StepReport] = []
            kernels: set[KernelResources] = set()
            for report, of_step in _compiled(engine, args.kernels):
                reports.append(report)
                kernels.update(of_step or ())
                if args.json:
                    print(_json_line(report, engine, of_step), flush=True)
                else:
                    print(_table_line(report, engine, chip), flush=True)
        fits = max(report.peak_bytes for report in reports) <= chip.memory_bytes
        if not args.json:
            _print_foot(engine, chip, reports)
            if args.kernels:
                print("\n".join(kernel_table(kernels)))
        return 0 if fits else 1


def _compiled(
    engine: AheadEngine, with_kernels: bool
) -> Iterator[tuple[StepReport, list[KernelResources] | None]]:
    """Every step of the ladder, and what its kernels take if that is wanted."""
    steps = engine.compile_steps()
    while True:
        with kernels_recorded() if with_kernels else nullcontext(lambda: None) as read:
            report = next(steps, None)
        if report is None:
            return
        yield report, read()


def _axes(args: argparse.Namespace, num_devices: int) -> MeshAxes:
    """Of the mesh. Raises ValueError for one that does not take all devices."""
    # Only here: they import jax, whose environment must be set before.
    from sharding import TENSOR, mesh_size, parse_mesh

    if args.mesh is not None and args.tensor is not None:
        raise ValueError(f"--mesh {args.mesh} and --tensor {args.tensor}: name one of them")
    if args.mesh is None:
        axes = ((TENSOR, num_devices if args.tensor is None else args.tensor),)
    else:
        axes = parse_mesh(args.mesh) or ((TENSOR, 1),)
    if mesh_size(axes) != num_devices:
        what = f"--mesh {args.mesh}" if args.tensor is None else f"--tensor {args.tensor}"
        raise ValueError(
            f"{what} on {num_devices} devices: replicas are compiled one at a time, so name a target of "
            f"{mesh_size(axes)}"
        )
    return axes


def _ladder(text: str) -> tuple[int, ...]:
    try:
        rungs = tuple(int(rung) for rung in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 256,2048") from None
    if list(rungs) != sorted(set(rungs)) or rungs[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} does not rise from 1 or more")
    return rungs


def _print_head(engine: AheadEngine, chip: Chip) -> None:
    cache = engine.config.cache
    print(
        f"{engine.num_devices} x {chip.name}, each: weights {engine.weight_bytes / GIB:.2f} GiB, pool "
        f"{engine.pool_bytes / GIB:.2f} GiB ({', '.join(map(str, cache.num_pages))} pages a layer of "
        f"{cache.page_size} tokens in {cache.kv_format}), of {chip.memory_bytes / GIB:.2f} GiB"
    )
    print("step            compile   temporaries  of pool  aliased  at best  sums a layer, sent, of ideal")


def _table_line(report: StepReport, engine: AheadEngine, chip: Chip) -> str:
    kind = "decode" if report.shape.decode else "chunk"
    in_place = "pool" if report.aliased_bytes >= engine.pool_bytes else "NOT THE POOL"
    return (
        f"{kind:6} {report.shape.rows:5}  {report.compile_seconds:7.1f} s  "
        f"{report.temporary_bytes / GIB:8.3f} GiB  {report.temporary_bytes / engine.pool_bytes:6.2%}  "
        f"{in_place:7}  {_least_seconds(report, engine, chip) * 1e3:6.2f} ms  {_sent(report, engine)}"
    )


def _sent(report: StepReport, engine: AheadEngine) -> str:
    """What devices say to each other in every step, log-probabilities and the like left out."""
    if not report.num_exchanges:
        return "-"
    layers = engine.config.model.num_layers
    return (
        f"{report.num_exchanges / layers:5.2f}, {report.sent_bytes / 2**20:.2f} MiB, "
        f"{report.sent_bytes / report.ideal_sent_bytes:.2f}"
    )


def _least_seconds(report: StepReport, engine: AheadEngine, chip: Chip) -> float:
    """Of the matrices alone: the larger of their arithmetic and of reading them once."""
    from jaxserve.planning.footprint import Footprint

    footprint, shape = Footprint.of(engine.config.model), report.shape
    operations = 2 * (footprint.active_weights() * shape.rows + footprint.head_weights * shape.logit_rows)
    weights = footprint.touched_weights(shape.rows) + footprint.head_weights
    operand_format, item_bytes = _matrix_operands(engine.config)
    arithmetic = operations / chip.peak(operand_format)
    num_devices = engine.num_devices / engine.config.num_replicas
    return max(arithmetic, weights * item_bytes / chip.memory_bandwidth) / num_devices


def _matrix_operands(config: EngineConfig) -> tuple[str, float]:
    """What matrices are multiplied in, and the bytes of a weight; one matrix of a layer stands for all."""
    format = recipe_named(config.recipe).format_of("layers.0.qkv") if config.recipe else None
    if format is None:
        return config.compute_format, 2.0 if config.compute_format == "bfloat16" else 4.0
    hidden = config.model.hidden_size
    # Twelve bits are two products of eight, which take as long as one of sixteen.
    operands = "int8" if format.row_bits == 8 else config.compute_format
    return operands, format.num_bytes(1, hidden) / hidden


def _json_line(report: StepReport, engine: AheadEngine, kernels: list[KernelResources] | None) -> str:
    fields: dict[str, Any] = dataclasses.asdict(report)
    if kernels is not None:
        fields["kernels"] = [kernel.as_json() for kernel in kernels]
    fields |= {"weight_bytes": engine.weight_bytes, "pool_bytes": engine.pool_bytes}
    return json.dumps(fields | {"peak_bytes": report.peak_bytes})


def _print_foot(engine: AheadEngine, chip: Chip, reports: list[StepReport]) -> None:
    peak = max(report.peak_bytes for report in reports)
    left = int(chip.memory_bytes) - peak
    total = sum(report.compile_seconds for report in reports)
    if left < 0:
        print(f"does not fit: {peak / GIB:.2f} GiB at the most, {-left / GIB:.2f} too many; {total:.0f} s")
        return
    pages = sum(engine.config.cache.num_pages)
    more = left * pages // engine.pool_bytes
    print(f"fits: {left / GIB:.2f} GiB left, room for {more} more pages; compiled in {total:.0f} s")
