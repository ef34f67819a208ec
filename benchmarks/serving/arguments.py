"""What the command line says."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from jaxserve.bench.figures import read_goodput

DOORS = ("http", "grpc", "vllm")
LEAST_VOCABULARY = 256
"""Token ids that every model has."""


def parse_arguments(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """See `--help`. `sweep` becomes the name of what varies, and its values."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="what to serve; with --url or --grpc-address what to ask for"
    )
    _add_server(parser.add_argument_group("server"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_load(parser.add_argument_group("load"))
    _add_results(parser.add_argument_group("results"))
    args = parser.parse_args(arguments)
    if args.png and not args.sweep:
        parser.error("--png draws a sweep: it needs --sweep")
    if args.library and args.sweep:
        parser.error("--library compares at one load: it does not go with --sweep")
    if args.library and (args.url or args.grpc_address):
        parser.error("--library needs a server of its own: it does not go with --url or --grpc-address")
    if args.trace and args.sweep and args.sweep[0] == "rate":
        parser.error("--sweep rate: a trace has its own times; sweep trace-load instead")
    if args.sweep and args.sweep[0] == "trace-load" and not args.trace:
        parser.error("--sweep trace-load needs --trace")
    return args


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--url", help="of a running server; without it and --grpc-address, `jaxserve serve` is started")
    add("--grpc-address", metavar="HOST:PORT", help="of a running server")
    add("--door", choices=DOORS, default="http", help="how to ask (default %(default)s)")
    add(
        "--serve-arguments",
        type=str.split,
        default=[],
        metavar="ARGUMENTS",
        help="further ones for the server that is started, as --serve-arguments='--policy open.toml'",
    )
    add("--num-slots", type=_count, metavar="N", help="of the server that is started, and of the library")
    add("--max-model-len", type=_count, metavar="N", help="likewise")
    add(
        "--library",
        action="store_true",
        help="measure the library with the same prompts in turn, and give the server's share of its rate",
    )
    add("--rounds", type=_count, default=3, metavar="N", help="of that comparison (default %(default)s)")


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-prompts", type=_count, default=100, metavar="N", help="(default %(default)s)")
    add("--dataset", choices=("random", "jsonl"), default="random", help="(default %(default)s)")
    add("--dataset-path", type=Path, metavar="FILE", help='lines of {"prompt": ..., "output_tokens": ...}')
    add("--input-len", type=_count, default=128, metavar="N", help="of random ones (default %(default)s)")
    add("--output-len", type=_count, default=64, metavar="N", help="tokens (default %(default)s)")
    add("--spread", type=float, default=0.0, metavar="R", help="lengths differ by this share (default 0)")
    add("--vocab-size", type=_count, default=LEAST_VOCABULARY, metavar="N", help="random ids are below this")
    add("--stop-at-eos", action="store_true", help="answers may end before their length")
    add("--seed", type=int, default=0)


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rate", type=float, default=math.inf, metavar="R", help="requests a second (default: all at once)")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1 is Poisson, less is burstier (default 1)",
    )
    add("--concurrency", type=_count, metavar="N", help="requests that are open at once (default: no limit)")
    add(
        "--trace", type=Path, metavar="FILE", help="times and lengths of Azure's CSV, Mooncake's or our JSONL"
    )
    add("--trace-load", type=float, default=1.0, metavar="X", help="so many times as fast (default 1)")
    add("--longest-input", type=_count, metavar="N", help="cut a trace's prompts to this")
    add("--longest-output", type=_count, metavar="N", help="cut a trace's answers to this")
    add("--warmups", type=int, default=1, metavar="N", help="uncounted requests before (default %(default)s)")
    add(
        "--sweep",
        type=_sweep,
        metavar="WHAT=A,B,...",
        help="a run for each value of rate, concurrency or trace-load",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--goodput",
        type=_goodput,
        metavar="LIMITS",
        help="what a good answer keeps, in ms, as ttft:500,tpot:50,e2el:5000",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures with vLLM's keys; a sweep's as a list")
    add("--save-detailed", action="store_true", help="every request's times and text in there too")
    add("--png", type=Path, metavar="FILE", help="draw latency against the load of a sweep")
    add("--quiet", action="store_true", help="no bar")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _goodput(text: str) -> dict[str, float]:
    try:
        return read_goodput(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sweep(text: str) -> tuple[str, list[float]]:
    name, _, values = text.partition("=")
    if name not in ("rate", "concurrency", "trace-load"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected rate=, concurrency= or trace-load= and numbers")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {values!r} is not a list of numbers") from None
    if not all(number > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: every value must be above 0")
    return name, numbers
