"""`jaxserve advise`: what to change about a server, from what was measured of it."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.commands.command import add_verbose_argument, say, shows_status

if TYPE_CHECKING:
    from jaxserve.planning.advice import Technique

_DESCRIPTION = """Answers six questions about a server and its traffic (does it fit, are prefixes shared, do
requests come together, is KV memory the limit, is latency per token the goal, do prefill and decode fight)
and says what to change: with evidence, price, setting, and what to watch. What was not measured is named."""
_SOURCES = """A SOURCE is the address of a running server (http://HOST:PORT, looked at twice); a saved metrics
page, or two of them from one process; a result of `python -m benchmarks.serving --json`; a trace (Azure's
CSV, Mooncake's or our JSON lines); or JSON lines of prompts, in which common parts and where they part are
looked for. Several go together."""
_DEFAULT_SECONDS = 30.0


class Advise:
    name = "advise"
    help = "say what to change about a server, from what was measured"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description, parser.epilog = _DESCRIPTION, _SOURCES
        add = parser.add_argument
        add("sources", metavar="SOURCE", nargs="+", help="what was measured; see below")
        add("--model", metavar="NAME", help="of a metrics page that has several")
        add(
            "--seconds",
            type=float,
            default=_DEFAULT_SECONDS,
            metavar="S",
            help="between two looks at a server; 0 looks once, at all since its start (default %(default)g)",
        )
        add(
            "--tpot-limit",
            type=float,
            metavar="MS",
            help="most time for each token (default: the class's target)",
        )
        add(
            "--without",
            action="append",
            default=[],
            metavar="TECHNIQUE=FILE",
            help="a benchmark of the same load without one of speculation, quantization and disaggregation; "
            "may be repeated",
        )
        add("--json", action="store_true", help="print a JSON object")
        add_verbose_argument(parser)

    def run(self, args: argparse.Namespace) -> int:
        if not 0 <= args.seconds < math.inf:
            raise ValueError(f"--seconds {args.seconds} is not a number from 0 up")
        from jaxserve.planning.advice import Limits, advise, gather

        limit = None if args.tpot_limit is None else args.tpot_limit / 1e3
        if args.seconds and shows_status(args) and any("://" in source for source in args.sources):
            say(f"looking at the server for {args.seconds:g} s")
        seen = gather(
            args.sources,
            limits=Limits(tpot=limit),
            without=_read_without(args.without),
            model=args.model,
            seconds=args.seconds,
        )
        report = advise(seen)
        print(json.dumps(report.to_json(), indent=2) if args.json else report.text(), flush=True)
        return 0


def _read_without(arguments: list[str]) -> dict[Technique, Path]:
    """Files by technique. Raises ValueError, naming it, for an argument that is malformed or there twice."""
    from jaxserve.planning.advice import TECHNIQUES

    known: dict[str, Technique] = {name: name for name in TECHNIQUES}
    files: dict[Technique, Path] = {}
    for argument in arguments:
        given, _, file = argument.partition("=")
        technique = known.get(given)
        if technique is None or not file:
            raise ValueError(f"--without {argument!r}: expected one of {', '.join(TECHNIQUES)}, = and a file")
        if technique in files:
            raise ValueError(f"--without {technique} is there twice")
        files[technique] = Path(file)
    return files
