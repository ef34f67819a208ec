"""How long the compilers of machines that are not here take for whole ladders, and what memory steps need.

    python -m benchmarks.compile_ladders [llama-3.1-8b@v6e-1 ...] [--write]

Each ladder is that of `jaxserve compile MODEL --target TARGET`: decode steps of 8, 32 and 128 sequences,
chunk steps of 256 and 2,048 rows, sampling included, bfloat16, from a configuration alone. `--write` puts
what was measured into `benchmarks/results/compile-ladders.json`, beside what is there of others. Seconds mean
something on an idle machine only.

Needs a TPU's compiler: the project's extra compilers-tpu.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results" / "compile-ladders.json"
COMMAND = "python -m benchmarks.compile_ladders --write"
LADDERS = (
    "llama-3.1-8b@v5e-4",
    "llama-3.1-8b@v6e-1",
    "llama-3.3-70b@v6e-8",
    "llama-3.3-70b@v5p-4",
    "mixtral-8x7b@v6e-8",
    "qwen3-30b-a3b@v6e-4",
)


def main() -> None:
    """Read the command line; compile ladders one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_ladders", description=__doc__)
    parser.add_argument("ladders", nargs="*", metavar="model@target", help=", ".join(LADDERS))
    parser.add_argument("--write", action="store_true", help=f"keep the results in {RESULTS.name}")
    arguments = parser.parse_args()
    for name in arguments.ladders or LADDERS:
        if "@" not in name:
            parser.error(f"{name!r} is no model@target, as {LADDERS[0]}")
        measured = compile_ladder(name)
        print(table_line(name, measured), flush=True)
        if arguments.write:
            write(name, measured)


def compile_ladder(name: str) -> dict[str, Any]:
    """Of a model on a target what `jaxserve compile --json` says of each step, and its time in all."""
    model, target = name.split("@")
    machine, started = describe(), time.monotonic()
    command = [sys.executable, "-m", "jaxserve", "compile", model, "--target", target, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr[-2000:]}")
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"machine": machine, "wall_seconds": round(time.monotonic() - started, 1), "steps": steps}


def verdict(measured: dict[str, Any]) -> dict[str, Any]:
    """The largest share of the pool and time of a step, that of all, and whether pools are in place."""
    steps = measured["steps"]
    return {
        "most_of_pool": max(step["temporary_bytes"] / step["pool_bytes"] for step in steps),
        "most_seconds": max(step["compile_seconds"] for step in steps),
        "seconds": sum(step["compile_seconds"] for step in steps),
        "in_place": all(step["aliased_bytes"] >= step["pool_bytes"] for step in steps),
    }


def table_line(name: str, measured: dict[str, Any]) -> str:
    """One ladder in words."""
    found = verdict(measured)
    each = ", ".join(f"{step['compile_seconds']:.1f}" for step in measured["steps"])
    return (
        f"{name:22} temporaries up to {found['most_of_pool']:.2%} of the pool, "
        f"{'in place' if found['in_place'] else 'NOT IN PLACE'}; {each} s, {found['seconds']:.0f} s in all"
    )


def write(name: str, measured: dict[str, Any]) -> None:
    """Put one ladder's figures beside the others'."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"ladders": {}}
    kept["command"] = COMMAND
    kept["ladders"][name] = measured
    kept["ladders"] = {key: kept["ladders"][key] for key in sorted(kept["ladders"])}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
