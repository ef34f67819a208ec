"""What a compiled program's devices say to each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

_OPCODES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(rf"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({_OPCODES})(?:-start)?\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\w+\[([\d,]*)\]")


def collectives(hlo: str) -> list[list[str | int]]:
    """Each as its operation, the elements that it brings, and the computation that it is part of."""
    return [list(found) for found in _collectives(hlo)]


def _collectives(hlo: str) -> Iterator[tuple[str, int, str]]:
    computation = ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            shapes = _ARRAY.findall(match[1])
            yield (
                match[2],
                sum(math.prod(map(int, filter(None, dims.split(",")))) for dims in shapes),
                computation,
            )
