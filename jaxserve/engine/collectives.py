"""What the devices of a compiled program say to each other, read from its text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

_OPERATIONS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({_OPERATIONS})(-start)?\(")
_ARRAY = re.compile(r"([a-z]+)(\d+)?[a-z0-9]*\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"ROOT .* compare\(.*%([\w.\-]+)\), direction=LT")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
_SCATTER = "all-reduce-scatter"
"""How the computation of a TPU's fusion begins that is a sum in its text, and leaves each device a part."""
_CALLED = re.compile(r"\b(?:calls|to_apply|condition)=%?([\w.\-]+)")


@dataclass(frozen=True)
class Collective:
    """One exchange between devices, of which a program may have several that are alike."""

    operation: str
    """all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute."""
    num_elements: int
    """Of its result on each device."""
    num_bytes: int
    """Likewise."""
    num_devices: int
    """That take part in each exchange; 0 where the text does not say: all."""
    conditional: bool
    """Whether it only happens where something needs it, such as log-probabilities."""

    @property
    def moved_bytes(self) -> float:
        """That a device sends, by a ring."""
        share = (self.num_devices - 1) / self.num_devices if self.num_devices else 1.0
        if self.operation == "all-reduce":
            return 2 * share * self.num_bytes
        if self.operation == "reduce-scatter":
            return share * self.num_bytes * self.num_devices
        return share * self.num_bytes


def collectives(hlo: str) -> Counter[Collective]:
    """How often each is done when the program runs once, a loop's body as often as it is known to turn."""
    computations, entry = _computations(hlo)
    found: Counter[Collective] = Counter()
    _walk(computations, entry, 1, False, found)
    return found


def _walk(
    computations: Mapping[str, list[str]],
    name: str,
    times: int,
    conditional: bool,
    found: Counter[Collective],
) -> None:
    for line in computations.get(name, ()):
        if collective := _collective(line, conditional):
            found[collective] += times
        for body in _BODY.findall(line):
            _walk(computations, body, times * _turns(computations, line), conditional, found)
        for branch in _branches(line):
            _walk(computations, branch, times, True, found)
        for called in _CALLED.findall(line):
            if called.startswith(_SCATTER):
                sums = (_collective(inner, conditional) for inner in computations.get(called, ()))
                found.update({_scattered(one): times for one in sums if one is not None})
            else:
                _walk(computations, called, times, conditional, found)


def _scattered(whole: Collective) -> Collective:
    """A sum of which each device is left with its part."""
    parts = max(whole.num_devices, 1)
    return replace(
        whole,
        operation="reduce-scatter",
        num_elements=whole.num_elements // parts,
        num_bytes=whole.num_bytes // parts,
    )


def _turns(computations: Mapping[str, list[str]], loop: str) -> int:
    """How often a loop turns: as its line says, or up to the constant that its condition counts to from 0, as
    loops over layers do; 1 for others."""
    if known := _TRIPS.search(loop):
        return int(known[1])
    condition = _CONDITION.search(loop)
    lines = computations.get(condition[1], ()) if condition else ()
    constants = dict(pair for line in lines for pair in _CONSTANT.findall(line))
    limits = [constants.get(name) for line in lines for name in _BELOW.findall(line)]
    return int(limits[0]) if len(limits) == 1 and limits[0] is not None else 1


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each, and which one is run."""
    lines: dict[str, list[str]] = {}
    current: list[str] = []
    entry = ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = lines.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        else:
            current.append(line)
    return lines, entry


def _branches(line: str) -> Iterator[str]:
    for several, one in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in several.split(",") if several)
        if one:
            yield one


def _collective(line: str, conditional: bool) -> Collective | None:
    match = _COLLECTIVE.match(line)
    if match is None:
        return None
    arrays = [
        (math.prod(int(size) for size in dims.split(",") if size), _item_bytes(kind, bits))
        for kind, bits, dims in _ARRAY.findall(match[1])
        if dims or kind != "u" or not match[3]  # What TPUs keep for asynchronous ones is a u32[] of its own.
    ]
    # The start of an asynchronous one lists what goes in before what comes out; a sum's are one.
    if match[3] and match[2] != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]
    elements = sum(number for number, _ in arrays)
    return Collective(
        match[2],
        elements,
        int(sum(number * item for number, item in arrays)),
        _num_devices(line),
        conditional,
    )


def _num_devices(line: str) -> int:
    """Of each exchange; 0 where the line does not say."""
    if named := _MESH_GROUPS.search(line):
        sizes = {axis: int(size) for axis, size in _MESH_AXIS.findall(named[1])}
        return math.prod(sizes.get(axis.strip(" '"), 0) for axis in named[2].split(","))
    groups = _GROUPS.search(line)
    if groups is None:
        return 0
    return int(groups[1]) if groups[1] else len(groups[2].split(","))


def _item_bytes(kind: str, bits: str) -> float:
    return int(bits) / 8 if bits else 1.0
