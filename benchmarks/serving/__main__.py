"""How does a server do under load? `python -m benchmarks.serving smollm2-135m --rate 2 --concurrency 32`

Starts `jaxserve serve`, or asks one that runs, and prints what `vllm bench serve` prints, under its names.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.machine import describe
from benchmarks.serving import doors, workload
from benchmarks.serving.arguments import parse_arguments
from benchmarks.serving.doors import OpenDoor
from benchmarks.serving.run import run_load
from benchmarks.serving.workload import Prompt
from jaxserve.bench.figures import DETAILS, Figures, describe_run, report, summarise
from jaxserve.bench.served import Addresses, served_model
from jaxserve.bench.traffic import DoorError

DEFAULT_MODEL = "smollm2-135m"


def make_prompts(args: argparse.Namespace) -> list[Prompt]:
    """As the arguments say. Raises ValueError or OSError for what cannot be read or is out of range."""
    if args.trace:
        return workload.trace_prompts(
            args.trace,
            args.num_prompts,
            load=args.trace_load,
            longest_input=args.longest_input,
            longest_output=args.longest_output,
            vocab_size=args.vocab_size,
            seed=args.seed,
        )
    if args.dataset == "jsonl":
        if args.dataset_path is None:
            raise ValueError("--dataset jsonl needs --dataset-path")
        prompts = workload.file_prompts(args.dataset_path, args.num_prompts, args.output_len)
    else:
        prompts = workload.random_prompts(
            args.num_prompts,
            input_len=args.input_len,
            output_len=args.output_len,
            spread=args.spread,
            vocab_size=args.vocab_size,
            seed=args.seed,
        )
    return workload.arriving(prompts, args.rate, args.burstiness, args.seed)


def opener(args: argparse.Namespace, addresses: Addresses) -> OpenDoor:
    """What opens the door that was asked for. Raises ValueError if the server's address is not known."""
    asked_for = args.model if args.url or args.grpc_address else None
    kinds = {"http": doors.open_http, "grpc": doors.open_native, "vllm": doors.open_vllm}
    address = addresses.url if args.door == "http" else addresses.grpc
    if address is None:
        needed = "--url" if args.door == "http" else "--grpc-address"
        raise ValueError(f"--door {args.door} needs {needed}")
    return functools.partial(kinds[args.door], address, asked_for, not args.stop_at_eos)


@contextmanager
def server(args: argparse.Namespace) -> Iterator[Addresses]:
    """The one that was named, or a new one."""
    if args.url or args.grpc_address:
        yield Addresses(args.url, args.grpc_address)
        return
    arguments = list(args.serve_arguments)
    if args.num_slots is not None:
        arguments += ["--num-slots", str(args.num_slots)]
    if args.max_model_len is not None:
        arguments += ["--max-model-len", str(args.max_model_len)]
    with served_model(args.model or DEFAULT_MODEL, arguments) as addresses:
        yield addresses


def measure(args: argparse.Namespace, open_door: OpenDoor) -> Figures:
    """One run at one load, printed as it ends."""
    run = asyncio.run(
        run_load(
            open_door,
            make_prompts(args),
            concurrency=args.concurrency,
            num_warmups=args.warmups,
            show_bar=not args.quiet,
        )
    )
    asked = describe_run(
        endpoint_type=args.door,
        backend=args.door,
        label=args.door,
        model_id=args.model,
        tokenizer_id=args.model,
        num_prompts=len(run.outcomes),
        request_rate="inf" if math.isinf(args.rate) or args.trace else args.rate,
        burstiness=args.burstiness,
        max_concurrency=args.concurrency,
    )
    figures = asked | summarise(run, args.goodput)
    print(report(figures), flush=True)
    for error in dict.fromkeys(filter(None, figures["errors"])):
        print(f"failed: {error}", file=sys.stderr)
    return figures


def at_load(args: argparse.Namespace, name: str, value: float) -> argparse.Namespace:
    """The same arguments at one point of a sweep."""
    field = name.replace("-", "_")
    return argparse.Namespace(**vars(args) | {field: int(value) if name == "concurrency" else value})


def sweep(args: argparse.Namespace, open_door: OpenDoor) -> list[Figures]:
    """A run for each load."""
    name, values = args.sweep
    runs: list[Figures] = []
    for value in values:
        print(f"\n{name} {value:g}")
        runs.append(measure(at_load(args, name, value), open_door))
    if args.png:
        from benchmarks.serving.plots import draw_sweep

        draw_sweep(name, values, runs, args.png)
    return runs


def compare(args: argparse.Namespace, open_door: OpenDoor) -> list[Figures]:
    """Server and library in turn, each round with prompts of its own, which neither has in its cache."""
    from benchmarks.serving.library import Library

    library = Library(
        args.model or DEFAULT_MODEL,
        num_slots=args.num_slots,
        max_model_len=args.max_model_len,
        ignore_eos=not args.stop_at_eos,
    )
    runs: list[Figures] = []
    for number in range(args.rounds):
        once = argparse.Namespace(**vars(args) | {"seed": args.seed + number})
        figures = measure(once, open_door)
        prompts = [replace(prompt, arrival=0.0) for prompt in make_prompts(once)]
        figures["library_output_throughput"] = library.tokens_per_second(prompts)
        print(f"library: {figures['library_output_throughput']:.1f} output tokens/s")
        runs.append(figures)
    best = max(run["output_throughput"] for run in runs)
    best_library = max(run["library_output_throughput"] for run in runs)
    print(
        f"best of {args.rounds}: server {best:.1f}, library {best_library:.1f} output tokens/s: "
        f"{best / best_library:.1%}"
    )
    return runs


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments)
    if args.library and args.num_slots is None:
        args.num_slots = args.concurrency = args.concurrency or 32
    try:
        make_prompts(args)  # What is wrong with them is known before a server is started.
        print(describe())
        with server(args) as addresses:
            open_door = opener(args, addresses)
            if args.library:
                runs = compare(args, open_door)
            else:
                runs = sweep(args, open_door) if args.sweep else [measure(args, open_door)]
    except (ValueError, OSError, RuntimeError, ImportError, DoorError) as error:
        sys.exit(f"benchmarks.serving: {error}")
    if args.json:
        for run in runs:
            for name in () if args.save_detailed else DETAILS:
                del run[name]
        alone = len(runs) == 1
        args.json.write_text(json.dumps(runs[0] if alone else runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
