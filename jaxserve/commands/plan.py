"""`jaxserve plan`: what to serve a model on, how fast it will be, what it costs and what it is bound by."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from jaxserve.commands.command import add_verbose_argument, say, shows_status
from jaxserve.config import KvFormat
from jaxserve.sizes import default_sizes

if TYPE_CHECKING:
    from jaxserve.config import FloatFormat, ModelConfig
    from jaxserve.planning.chips import Chip
    from jaxserve.planning.cost_model import CostModel
    from jaxserve.planning.meshes import ChipMesh
    from jaxserve.planning.plan_records import Candidate, Demand, Row, Sizes
    from jaxserve.planning.plan_report import PlanReport
    from jaxserve.planning.precision import Precision
    from jaxserve.planning.targets import PlanTarget
    from jaxserve.planning.traces import Trace

_T = TypeVar("_T")
_SAMPLED_REQUESTS = 96
"""At least, of a workload that is told by its means."""


class Plan:
    name = "plan"
    help = "what to serve a model on: memory, speed, cost and what binds it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = (
            "Simulates the scheduler over modelled steps for each precision, mesh and drafting, and says "
            "which serves the workload within the limits. Exit status 1 if none does. `--target cpu` "
            "measures this machine first."
        )
        add = parser.add_argument
        add("model", metavar="MODEL", help="a known model (llama-3.1-8b), a folder, or a config.json")
        add(
            "--target",
            required=True,
            metavar="NAME",
            help="cpu, v5e, v5p, v6e, h100, h200; v6e-8 for 8 chips",
        )
        _add_workload_arguments(parser)
        _add_candidate_arguments(parser)
        add("--ttft", type=float, default=float("inf"), metavar="S", help="limit to the first token, seconds")
        add("--tpot", type=float, default=float("inf"), metavar="S", help="limit for each token after it")
        add("--attainment", type=float, default=0.95, metavar="X", help="share within them (default 0.95)")
        add("--price", type=float, metavar="X", help="of a chip for an hour")
        add("--json", action="store_true", help="print the plan as JSON")
        add("--png", type=Path, metavar="FILE", help="draw it (needs jaxserve[plots])")
        add("--compile", action="store_true", help="compile the plan's steps too, and report their memory")
        add_verbose_argument(parser)

    def run(self, args: argparse.Namespace) -> int:
        from jaxserve.engine.machines import COMPILER_ENVIRONMENT
        from jaxserve.planning.models import find_model
        from jaxserve.planning.plan_report import PlanReport
        from jaxserve.planning.targets import PlanTarget

        if args.compile:
            os.environ.update(COMPILER_ENVIRONMENT)  # Before jax is imported, which meshes need.
        target, model = PlanTarget.parse(args.target), find_model(args.model)
        demand = _demand(args, target, model)
        sizes = _sizes(args, target, demand.trace)
        chip, candidates = _candidates(args, target, model, demand, sizes)
        with _bar(args, len(candidates)) as on_run:
            rows = _plan(candidates, demand, sizes, on_run)
        if all(row.reason for row in rows):
            raise ValueError(rows[-1].reason)
        cost = candidates[0].cost
        report = PlanReport(
            model=args.model,
            footprint=cost.footprint,
            chip=chip,
            kv_format=cost.kv_format,
            page_size=cost.page_size,
            demand=demand,
            sizes=sizes,
            rows=rows,
        )
        return _show(args, report, candidates)


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--prompt-mean", type=float, default=512.0, metavar="N", help="tokens (default 512)")
    add("--prompt-p95", type=float, metavar="N", help="95th percentile (default: twice the mean)")
    add("--output-mean", type=float, default=128.0, metavar="N", help="tokens (default 128)")
    add("--output-p95", type=float, metavar="N", help="95th percentile (default: twice the mean)")
    add("--reuse", type=float, default=0.0, metavar="X", help="share of prompts seen before (default 0)")
    add("--rate", type=float, metavar="R", help="requests a second (default: what one engine serves)")
    add("--concurrency", type=int, metavar="N", help="instead: N requests, all at once")
    add("--trace", type=Path, metavar="FILE", help="instead: recorded traffic (Azure, Mooncake, JSON lines)")
    add("--trace-seconds", type=float, metavar="S", help="of the trace, from its start")
    add("--seed", type=int, default=0, help="of lengths and arrivals")


def _add_candidate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to compare").add_argument
    add("--precision", type=_list_of(str), metavar="A,B", help="float32, bfloat16, int8, w8a8, fp8, int4")
    add(
        "--mesh",
        type=_list_of(str),
        metavar="M,M",
        help="chips of one engine: numbers, along tensor, or axes as in tensor=8+pipe=2 (default: the best "
        "of 1, 2, 4 and 8, and of more where those do not hold the model)",
    )
    add("--acceptance", type=_list_of(float), metavar="X,X", help="also with drafts, accepted so often")
    add("--kv-format", "--kv", default="auto", choices=["auto", *get_args(KvFormat)])
    add("--slots", type=int, metavar="N", help="sequences at once (default 64, on CPU 16)")
    add("--max-chunk", type=int, metavar="N", help="rows of a step (default 1024, on CPU 256)")
    add("--max-model-len", type=int, metavar="N", help="longest sequence (default: of the workload)")


def _list_of(kind: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    def parse(text: str) -> list[_T]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,2") from None

    return parse


def _demand(args: argparse.Namespace, target: PlanTarget, model: ModelConfig) -> Demand:
    from jaxserve.planning.plan_records import Demand
    from jaxserve.planning.report import Target

    asked = [name for name in ("rate", "concurrency", "trace") if getattr(args, name) is not None]
    if len(asked) > 1:
        raise ValueError(f"--{asked[0]} and --{asked[1]} each say when requests come: give one of them")
    trace = _read_trace(args) if args.trace else _sampled_trace(args, target, model)
    rate = args.rate
    if args.trace:
        rate = len(trace) / max(trace.seconds, 1.0)
    return Demand(
        trace=trace,
        rate=rate,
        all_at_once=args.concurrency is not None,
        target=Target(ttft=args.ttft, tpot=args.tpot),
        attainment=args.attainment,
        price=args.price,
        num_chips=target.num_chips,
    )


def _read_trace(args: argparse.Namespace) -> Trace:
    from jaxserve.planning.trace_files import read_trace

    trace = read_trace(args.trace)
    return trace if args.trace_seconds is None else trace.window(0.0, args.trace_seconds)


def _sampled_trace(args: argparse.Namespace, target: PlanTarget, model: ModelConfig) -> Trace:
    from jaxserve.planning.workload import Lengths, Workload

    if args.concurrency is not None and args.concurrency < 1:
        raise ValueError(f"--concurrency {args.concurrency} is below 1")
    workload = Workload(
        prompt=Lengths(mean=args.prompt_mean, p95=args.prompt_p95 or 2 * args.prompt_mean),
        output=Lengths(mean=args.output_mean, p95=args.output_p95 or 2 * args.output_mean),
        reuse=args.reuse,
    )
    # Several times as many as run at once: what it is like in the middle is what counts.
    count = args.concurrency or max(_SAMPLED_REQUESTS, 3 * _num_slots(args, target))
    return workload.trace(count, longest=args.max_model_len or model.max_position, seed=args.seed)


def _num_slots(args: argparse.Namespace, target: PlanTarget) -> int:
    return args.slots or default_sizes(on_cpu=target.is_cpu).num_slots


def _sizes(args: argparse.Namespace, target: PlanTarget, trace: Trace) -> Sizes:
    from jaxserve.planning.plan_records import Sizes

    longest = max(one.prompt_tokens + one.output_tokens for one in trace.requests)
    return Sizes(
        num_slots=_num_slots(args, target),
        max_chunk=args.max_chunk or default_sizes(on_cpu=target.is_cpu).max_chunk,
        max_model_len=args.max_model_len or longest,
    )


def _candidates(
    args: argparse.Namespace, target: PlanTarget, model: ModelConfig, demand: Demand, sizes: Sizes
) -> tuple[Chip, list[Candidate]]:
    """The chip, and every precision on every mesh with every way to draft."""
    from jaxserve.planning.plan_records import Candidate
    from jaxserve.planning.precision import find_precision

    others: FloatFormat = "float32" if target.is_cpu else "bfloat16"
    precisions = [find_precision(name) for name in args.precision or [others, "int8"]]
    acceptances = (None, *(args.acceptance or ()))
    for acceptance in acceptances[1:]:
        if not 0 <= acceptance < 1:
            raise ValueError(f"--acceptance {acceptance:g} is out of range: it must be from 0 to below 1")
    if target.is_cpu:
        chip, cost_of = _measured(args, model, sizes)
    else:
        chip, cost_of = _modelled(args, target, model)

    def on(mesh: ChipMesh, precision: Precision, acceptance: float | None = None) -> Candidate:
        # Groups decode in turn where nobody waits for drafts.
        cost = cost_of(precision, mesh, acceptance is None)
        return Candidate(precision=precision, cost=cost, others=others, acceptance=acceptance)

    def meshes(precision: Precision) -> Iterator[ChipMesh]:
        if args.mesh is not None:
            return (_mesh(text, target, model) for text in args.mesh)
        return _usual_meshes(target, model, lambda mesh: on(mesh, precision), demand, sizes)

    return chip, [
        on(mesh, precision, acceptance)
        for precision in precisions
        for mesh in meshes(precision)
        for acceptance in acceptances
    ]


def _mesh(text: str, target: PlanTarget, model: ModelConfig) -> ChipMesh:
    """One that is asked for. Raises ValueError where there are fewer chips, or the model is not divided."""
    from jaxserve.engine.mesh import spread_model
    from jaxserve.planning.meshes import ChipMesh
    from jaxserve.planning.targets import MOST_CHIPS
    from sharding import mesh_size, parse_mesh

    axes = parse_mesh(f"tensor={text}" if text.strip().isdecimal() else text.replace("+", ","))
    available = target.num_chips or MOST_CHIPS
    if not 1 <= mesh_size(axes) <= available:
        raise ValueError(f"a mesh of {mesh_size(axes)} chips is out of range: there are 1 to {available}")
    spread_model(model, axes)
    return ChipMesh(**dict(axes))


def _usual_meshes(
    target: PlanTarget,
    model: ModelConfig,
    on: Callable[[ChipMesh], Candidate],
    demand: Demand,
    sizes: Sizes,
) -> Iterator[ChipMesh]:
    """Of each number of chips those ways to use them that no other beats; replicas where they take all chips
    that there are, since several engines do the same otherwise."""
    from jaxserve.engine.mesh import divides
    from jaxserve.planning.meshes import meshes_of
    from jaxserve.planning.planner import shortlist
    from jaxserve.planning.targets import USUAL_MESH

    found = False
    for size in target.mesh_sizes():
        if size > USUAL_MESH and found:
            return
        legal = [mesh for mesh in meshes_of(size) if divides(model, mesh.axes)]
        with_replicas = size == target.num_chips
        best = shortlist([on(mesh) for mesh in legal if with_replicas or mesh.data == 1], demand, sizes)
        found = found or bool(best)
        # What is too small says so.
        yield from [one.cost.mesh for one in best] if best or found else [legal[0]] if legal else []


CostOf = Callable[["Precision", "ChipMesh", bool], "CostModel"]
"""What steps take in a precision on some chips, groups in turn on their stages or not."""


def _modelled(args: argparse.Namespace, target: PlanTarget, model: ModelConfig) -> tuple[Chip, CostOf]:
    """From the peaks that the chip's vendor tells."""
    from jaxserve.planning.cost_model import CostModel
    from jaxserve.planning.footprint import Footprint

    chip, footprint = target.chip(), Footprint.of(model)

    def cost_of(precision: Precision, mesh: ChipMesh, in_turn: bool) -> CostModel:
        return CostModel(
            footprint,
            chip,
            mesh=mesh,
            in_turn=in_turn,
            weight_format=precision.weight_format,
            compute_format=precision.compute_format,
            kv_format="bfloat16" if args.kv_format == "auto" else args.kv_format,
        )

    return chip, cost_of


def _measured(args: argparse.Namespace, model: ModelConfig, sizes: Sizes) -> tuple[Chip, CostOf]:
    """From what a few layers take on this machine."""
    from jaxserve.calibration import Calibration

    on_progress = say if shows_status(args) else lambda stage: None
    calibration = Calibration(model, sizes, kv_format=args.kv_format, on_progress=on_progress)
    return calibration.chip, lambda precision, mesh, in_turn: calibration.cost(precision)


@contextmanager
def _bar(args: argparse.Namespace, num_candidates: int) -> Iterator[Callable[[], object]]:
    from tqdm import tqdm  # pyright: ignore[reportMissingModuleSource]

    disable = not shows_status(args)
    with tqdm(desc=f"{num_candidates} candidates", unit=" simulations", leave=False, disable=disable) as bar:
        yield bar.update


def _plan(
    candidates: list[Candidate], demand: Demand, sizes: Sizes, on_run: Callable[[], object]
) -> list[Row]:
    from jaxserve.planning.planner import plan

    return plan(candidates, demand, sizes, on_run)


def _show(args: argparse.Namespace, report: PlanReport, candidates: list[Candidate]) -> int:
    best = report.best
    compiled: list[dict[str, Any]] = []
    if args.compile and best is not None:
        compiled = _compile(args, candidates[report.rows.index(best)], report.sizes)
    if args.png:
        from jaxserve.planning.plots import draw_plan

        draw_plan(report.rows, report.demand.target, args.png)
    if args.json:
        print(json.dumps(report.to_json() | {"compiled": compiled}))
    else:
        print(report.to_text())
        for step in compiled:
            print(
                f"compiled   {step['kind']} of {step['rows']} rows: {step['peak_bytes'] / 2**30:.2f} GiB of "
                f"a chip, {step['temporary_bytes'] / 2**30:.3f} of them temporaries"
            )
    sys.stdout.flush()
    return 0 if best is not None else 1


def _compile(args: argparse.Namespace, candidate: Candidate, sizes: Sizes) -> list[dict[str, Any]]:
    """The compiler's own account of the largest steps' memory, of one chip.

    Raises ValueError where the compiler is missing, or knows no such machine.
    """
    from jaxserve.engine.machines import Machine

    cost = candidate.cost
    machine = Machine.parse(f"{cost.chip.name}-{cost.mesh.size}")
    machine.require_compiler()
    from jaxserve.engine.ahead import prepare_ahead
    from jaxserve.engine.options import EngineOptions

    options = EngineOptions(
        max_model_len=sizes.max_model_len,
        num_slots=sizes.num_slots,
        quantize=candidate.precision.recipe,
        kv_format=args.kv_format,
        page_size=cost.page_size,
    )
    slots = sizes.num_slots // cost.mesh.data
    with machine.mesh(cost.mesh.axes or [("tensor", 1)]) as mesh:
        engine = prepare_ahead(
            cost.footprint.model,
            options,
            mesh,
            machine.platform,
            cost.chip.memory_bytes,
            (slots,),
            (max(sizes.max_chunk, slots),),
        )
        return [
            {
                "kind": "decode" if step.shape.decode else "chunk",
                "rows": step.shape.rows,
                "peak_bytes": step.peak_bytes,
                "temporary_bytes": step.temporary_bytes,
            }
            for step in engine.compile_steps()
        ]
