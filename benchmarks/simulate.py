"""How would an hour of traffic fare? `python -m benchmarks.simulate --trace azure-chat --load 1,5 --chip v5e`

Replays a trace through the real scheduler and loop over steps that take the time a cost model says, on a
virtual clock, once for each load and each policy. Prints waits, latencies and goodput side by side, by
class and by tenant; writes them as JSON, and the course of things as PNG.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxserve.plan import EngineLimits
from jaxserve.planning import (
    CHIPS,
    MODELS,
    Contender,
    CostModel,
    Footprint,
    Simulation,
    SimulationOptions,
    Summary,
    Target,
    Trace,
    find_chip,
    find_model,
    read_trace,
    simulate,
    summarise,
    table,
    virtual_limits,
)
from jaxserve.planning.footprint import KV_BYTES, WEIGHT_BYTES
from jaxserve.planning.meshes import ChipMesh
from jaxserve.planning.plots import draw_timelines
from jaxserve.planning.policies import POLICIES, find_contender
from jaxserve.scheduling.classes import DEFAULT_CLASSES

TRACE_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
"""Public traces that lie beside a development checkout."""
TRACE_FILES = {
    "azure-chat": "azure2023/AzureLLMInferenceTrace_conv.csv",
    "azure-code": "azure2023/AzureLLMInferenceTrace_code.csv",
    "mooncake": "mooncake/conversation_trace.jsonl",
}
MOST_CHIPS = 64


@dataclass(frozen=True)
class Setting:
    """The machine and the traffic that every run shares."""

    trace: Trace
    cost: CostModel
    limits: EngineLimits
    options: SimulationOptions
    targets: Mapping[str, Target]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--trace", default="azure-chat", help=f"a file, or one of {', '.join(TRACE_FILES)}")
    traffic.add_argument("--trace-folder", type=Path, default=TRACE_FOLDER, help="where the named ones lie")
    traffic.add_argument("--seconds", type=float, default=3600.0, help="of the trace, from its start")
    traffic.add_argument("--load", type=numbers, default=[1.0], help="arrivals so many times as fast: 1,2,5")
    traffic.add_argument("--tenants", type=shares, help="assigned at random by shares: a=0.8,b=0.2")
    traffic.add_argument("--priorities", type=shares, help="likewise: interactive=0.5,default=0.5")
    traffic.add_argument("--max-tokens", type=int, default=2048, help="that every client asks for at most")
    traffic.add_argument("--deadline", type=float, help="seconds after which an answer is worth nothing")
    traffic.add_argument("--retries", type=int, default=0, help="of clients that are turned away")
    traffic.add_argument("--seed", type=int, default=0)
    machine = parser.add_argument_group("machine")
    machine.add_argument("--chip", choices=CHIPS, default="v5e")
    machine.add_argument(
        "--num-chips", type=int, help="by default the fewest that hold model and longest prompt"
    )
    machine.add_argument("--model", default="llama-3.1-8b", help=f"a folder, or one of {', '.join(MODELS)}")
    machine.add_argument("--weight-format", choices=WEIGHT_BYTES, default="bfloat16")
    machine.add_argument("--kv-format", choices=KV_BYTES, default="bfloat16")
    machine.add_argument("--page-size", type=int, default=64)
    machine.add_argument("--slots", type=int, default=256)
    machine.add_argument("--max-chunk", type=int, default=1024)
    machine.add_argument("--max-model-len", type=int, help="by default what the trace needs")
    machine.add_argument("--host-us", type=float, default=300.0, help="the host's time for each step")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--policy", type=names, default=list(POLICIES), help=f"{','.join(POLICIES)}, or files")
    asked.add_argument("--ttft", type=float, help="target in seconds; by default each class's own")
    asked.add_argument("--tpot", type=float, help="likewise")
    asked.add_argument("--json", type=Path, help="add all figures to this file, in place of older ones")
    asked.add_argument("--png", type=Path, help="write the timelines of the highest load to this file")
    return parser.parse_args(arguments)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return text.split(",")


def shares(text: str) -> dict[str, float]:
    pairs = (part.partition("=") for part in text.split(","))
    return {name: float(share) for name, _, share in pairs}


def open_trace(args: argparse.Namespace) -> Trace:
    path = args.trace_folder / TRACE_FILES[args.trace] if args.trace in TRACE_FILES else Path(args.trace)
    trace = read_trace(path).window(0.0, args.seconds)
    return trace.assigned(tenants=args.tenants, priorities=args.priorities, seed=args.seed)


def build_machine(args: argparse.Namespace, trace: Trace) -> tuple[CostModel, EngineLimits]:
    """The chips, as many as asked for or as few as will do, and what an engine on them offers."""
    model = find_model(args.model)
    footprint = Footprint.of(model)
    longest = max(request.prompt_tokens + request.output_tokens for request in trace.requests)
    length = args.max_model_len or min(longest, model.max_position)
    counts = [args.num_chips] if args.num_chips else [2**n for n in range(MOST_CHIPS.bit_length())]
    for num_chips in counts:
        cost = CostModel(
            footprint,
            find_chip(args.chip),
            mesh=ChipMesh(tensor=num_chips),
            weight_format=args.weight_format,
            kv_format=args.kv_format,
            page_size=args.page_size,
        )
        try:
            limits = virtual_limits(
                cost, num_slots=args.slots, max_model_len=length, max_chunk=args.max_chunk
            )
        except ValueError:
            if num_chips == counts[-1]:
                raise
        else:
            return cost, limits
    raise AssertionError("the last count returns or raises")


def run(
    setting: Setting, load: float, policy: str, contender: Contender
) -> tuple[Simulation, Summary, float]:
    """One simulation, its figures, and the processor seconds that it took: others may use the machine."""
    trace = setting.trace.scaled(load)
    start = time.process_time()
    with tqdm(
        total=len(trace), desc=f"load {load:g}, {policy}", unit=" requests", leave=False, disable=None
    ) as bar:
        simulation = simulate(
            trace,
            setting.limits,
            setting.cost.step_seconds,
            contender,
            setting.options,
            on_end=bar.update,
        )
    return simulation, summarise(simulation, setting.targets), time.process_time() - start


def print_setting(setting: Setting) -> None:
    trace, cost, limits = setting.trace, setting.cost, setting.limits
    prompts = sum(request.prompt_tokens for request in trace.requests)
    outputs = sum(request.output_tokens for request in trace.requests)
    print(
        f"trace    {trace.name}: {len(trace)} requests in {trace.seconds:.0f} s, in the mean "
        f"{prompts / len(trace):.0f} prompt and {outputs / len(trace):.0f} output tokens; "
        f"ideal reuse {trace.ideal_reuse:.1%}"
    )
    print(
        f"machine  {cost.mesh.size} x {cost.chip.name}, {cost.footprint.num_parameters / 1e9:.2f} G "
        f"parameters in {cost.weight_format}; {limits.num_slots} slots, {limits.num_pages[0] - 1} pages of "
        f"{limits.page_size} tokens in {cost.kv_format}, at most {limits.max_model_len} tokens"
    )
    print(f"peaks    {cost.chip.source}")
    for name, target in setting.targets.items():
        print(f"target   {name}: TTFT {target.ttft:g} s, TPOT {1e3 * target.tpot:g} ms")


def print_load(load: float, summaries: Mapping[str, Summary]) -> None:
    """The policies side by side: everybody, each class, each tenant."""
    print(f"\nload {load:g}")
    rows = [(policy, summary.overall) for policy, summary in summaries.items()]
    first = next(iter(summaries.values()))
    for groups in ("by_priority", "by_tenant"):
        if len(getattr(first, groups)) > 1:
            rows += [
                (f"{policy}: {name or '(no tenant)'}", getattr(summary, groups)[name])
                for name in getattr(first, groups)
                for policy, summary in summaries.items()
            ]
    print(table(rows))
    for policy, summary in summaries.items():
        refused = ", ".join(f"{count} {reason}" for reason, count in summary.overall.rejected.items())
        cut_off = ", ".join(f"{count} {how}" for how, count in summary.overall.cut_off.items())
        print(
            f"{policy}: {summary.output_tokens_per_second:.0f} output tokens/s, device busy "
            f"{summary.busy_share:.1%}, {summary.preemptions} preemptions, reuse {summary.reuse:.1%} "
            f"({summary.cached_tokens} tokens, {summary.saved_seconds:.0f} s of prefill); "
            f"refused: {refused or 'none'}; cut off: {cut_off or 'none'}"
        )


def add_result(path: Path, found: dict[str, Any]) -> None:
    """Put a run into a file, in place of one of the same load and policy: hours come piece by piece."""
    runs: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    runs = [run for run in runs if (run["load"], run["policy"]) != (found["load"], found["policy"])]
    runs = sorted([*runs, found], key=lambda run: (run["load"], run["policy"]))
    path.write_text(json.dumps(runs, indent=1) + "\n")


def class_targets(args: argparse.Namespace, trace: Trace) -> dict[str, Target]:
    """For each class in the trace what was asked for, or what the product's class aims at."""
    classes = {one.name: one for one in DEFAULT_CLASSES}
    present = sorted({request.priority for request in trace.requests})
    return {
        name: Target(ttft=args.ttft or classes[name].ttft_target, tpot=args.tpot or classes[name].tpot_target)
        for name in present
    }


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    command = "python -m benchmarks.simulate " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    try:
        trace = open_trace(args)
        cost, limits = build_machine(args, trace)
        contenders = {
            Path(name).stem: find_contender(name, ttft_target=args.ttft, tpot_target=args.tpot)
            for name in args.policy
        }
        options = SimulationOptions(
            host_seconds=args.host_us * 1e-6,
            max_tokens=args.max_tokens,
            deadline=args.deadline,
            retries=args.retries,
            seed=args.seed,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.simulate: {error}")
    setting = Setting(trace, cost, limits, options, class_targets(args, trace))
    print_setting(setting)
    timelines: dict[str, Simulation] = {}
    for load in args.load:
        summaries: dict[str, Summary] = {}
        for policy, contender in contenders.items():
            simulation, summaries[policy], spent = run(setting, load, policy, contender)
            if args.json:
                found = {"load": load, "policy": policy, "command": command, "processor_seconds": spent}
                add_result(args.json, found | summaries[policy].to_json())
            if load == max(args.load):
                timelines[policy] = simulation
            rates = f"{len(trace) / spent:.0f} requests and {simulation.num_steps / spent:.0f} steps a second"
            print(
                f"load {load:g}, {policy}: {simulation.end:.0f} virtual seconds in {spent:.1f} s of a "
                f"processor, {rates}"
            )
        print_load(load, summaries)
    if args.png:
        draw_timelines(timelines, args.png)


if __name__ == "__main__":
    main()
