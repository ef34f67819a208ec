"""Compile a complete step for machines that are not here, and print what it costs them in memory.

    python -m tests.compilers.measure [v6e] [h200] [h200x8] [--rows 64 1024] [--json]

A target needs its compiler installed: the project's extra compilers-tpu or compilers-gpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING

from tests.compilers.targets import COMPILER_ENVIRONMENT, TARGETS

if TYPE_CHECKING:
    from tests.compilers.spike import Measured

MIB = 2**20
COLUMNS = "{:7} {:>5} {:>8} {:>13} {:>13} {:>12} {:>9} {:>13} {:>7}"
HEADER = COLUMNS.format(
    "target", "rows", "compile", "arguments", "cache", "temporaries", "of cache", "aliased", "copies"
)


def main() -> None:
    """Read the command line, compile, print a line for each step."""
    parser = argparse.ArgumentParser(prog="python -m tests.compilers.measure", description=__doc__)
    installed = [name for name in ("v6e", "h200") if TARGETS[name].missing is None]
    parser.add_argument("targets", nargs="*", metavar="target", help=", ".join(TARGETS))
    parser.add_argument("--rows", nargs="*", type=int, default=[], help="64 decodes; any other is a chunk")
    parser.add_argument("--json", action="store_true", help="print each step as a line of JSON")
    arguments = parser.parse_args()
    for name in arguments.targets or installed:
        if name not in TARGETS:
            parser.error(f"unknown target {name!r}: choose from {', '.join(TARGETS)}")
        if reason := TARGETS[name].missing:
            parser.error(f"{name}: {reason}")
    os.environ.update(COMPILER_ENVIRONMENT)
    from tests.compilers.spike import CHUNK, DECODE, compile_spike

    if not arguments.json:
        print(HEADER)
    for name in arguments.targets or installed:
        for rows in arguments.rows or (DECODE.rows, CHUNK.rows):
            shape = DECODE if rows == DECODE.rows else dataclasses.replace(CHUNK, rows=rows)
            measured = compile_spike(TARGETS[name], shape)
            print(json.dumps(dataclasses.asdict(measured)) if arguments.json else _table_line(measured))
            sys.stdout.flush()


def _table_line(measured: Measured) -> str:
    arguments, cache, temporaries, aliased = (
        f"{size / MIB:.1f} MiB"
        for size in (measured.arguments, measured.cache, measured.temporaries, measured.aliased)
    )
    return COLUMNS.format(
        measured.target,
        measured.rows,
        f"{measured.compile_seconds:.1f} s",
        arguments,
        cache,
        temporaries,
        f"{measured.temporaries_share:.2%}",
        aliased,
        len(measured.copies),
    )


if __name__ == "__main__":
    main()
