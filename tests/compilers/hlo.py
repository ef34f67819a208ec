"""Reading a compiled program: which instructions write out what should only be read, or stay in place."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator

PASSES_ON = frozenset(
    [
        "parameter",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "while",
        "conditional",
        "call",
        "optimization-barrier",
        "constant",
    ]
)
"""Opcodes whose result is their operand's memory."""
WRITES_INTO = frozenset(["fusion", "scatter", "dynamic-update-slice", "custom-call"])
"""Opcodes that change an array in place. That XLA did not have to copy it first, its temporaries show."""

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(")
ARRAY = re.compile(r"\w+\[([\d,]*)\](\{[^}]*\})?")
FAST_MEMORY = re.compile(r"S\([1-9]")
"""A layout's mark for memory on the chip, where a TPU keeps what it is about to read."""


def whole_copies(
    hlo: str, read_only: Collection[int], in_place: Collection[int] = (), *, on_chip: bool = False
) -> tuple[str, ...]:
    """Instructions, outside of fusions, that write such an array to the device's main memory.

    Args:
        hlo: a compiled program's text.
        read_only: numbers of elements of arrays that nothing should write. Only numbers are compared, since
            a copy may have another shape or type.
        in_place: numbers of elements of arrays that may be changed in place, but never copied or relaid.
        on_chip: those too that write it to memory on the chip.

    Returns each as its name, opcode and type.
    """
    found: list[str] = []
    for name, result, opcode in _instructions(hlo):
        # Of an asynchronous pair the start's result lists operands too; the end's is what was written.
        if opcode in PASSES_ON or opcode.endswith("-start"):
            continue
        sizes = [math.prod(map(int, dims.split(","))) for dims in _shapes(result, on_chip)]
        kept = [size for size in sizes if size in in_place and opcode not in WRITES_INTO]
        if kept or any(size in read_only for size in sizes):
            found.append(f"{name} {opcode} {result}")
    return tuple(found)


def _instructions(hlo: str) -> Iterator[tuple[str, str, str]]:
    """Name, result type and opcode of every instruction that is not part of a fusion."""
    fused = set(re.findall(r"fusion\(.*calls=%?([\w.\-]+)", hlo))
    computation = ""
    for line in hlo.splitlines():
        if header := COMPUTATION.match(line):
            computation = header.group(1)
        elif computation not in fused and (instruction := INSTRUCTION.match(line)):
            name, result, opcode = instruction.groups()
            yield name, result, opcode


def _shapes(result: str, on_chip: bool) -> Iterator[str]:
    """The dimensions, as text, of each array of a result that has any and lies in main memory."""
    for dims, layout in ARRAY.findall(result):
        if dims and (on_chip or not FAST_MEMORY.search(layout)):
            yield dims
