"""What the TPU compiler made of a kernel: the instruction bundles of its final schedule, loop by loop.

A TPU core issues one bundle a cycle, so a loop body's bundles are its time, waits for memory aside. Listed is
not executed: a body counts once for each trip, and a branch that is rarely taken hardly at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
"""Columns of the compiler's table of use."""
BRANCH_DELAY = 4
"""Bundles after a branch that are executed whether it is taken or not."""

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:((?: >+)*) *\{(.*)")
_TRIVIAL = re.compile(r"^\s*\}?\s*(/\*.*)?$")


@dataclass(frozen=True)
class Bundle:
    """One cycle's instructions."""

    label: str
    """LB where a loop's body begins, PF where the paths of a branch meet, or nothing."""
    depth: int
    """Of loops around it."""
    text: str
    use: tuple[int, ...]
    """Slots taken of each of UNITS."""

    def __getitem__(self, unit: str) -> int:
        return self.use[UNITS.index(unit)]

    @property
    def works(self) -> bool:
        """Whether it multiplies or moves pages: what a kernel does in every iteration."""
        return self["MXU"] > 0 or "dma.hbm_to_vmem" in self.text


@dataclass(frozen=True)
class Loop:
    """An iteration of a loop: its bundles but for inner loops, and for branches that do not work."""

    bundles: tuple[Bundle, ...]

    def __len__(self) -> int:
        return len(self.bundles)

    def total(self, unit: str) -> int:
        return sum(bundle[unit] for bundle in self.bundles)

    @property
    def mxu_share(self) -> float:
        """Bundles with an instruction for the matrix units, of all."""
        return sum(bundle["MXU"] > 0 for bundle in self.bundles) / len(self)


def read_bundles(folder: Path, kernel: str) -> list[Bundle]:
    """The final schedule of a kernel from a folder of the compiler's dumps.

    Raises ValueError if the folder has none, or if its files do not fit together.
    """
    files = [path for path in folder.glob(f"*{kernel}*-final_bundles.txt") if "analysis" not in path.name]
    tables = list(folder.glob(f"*{kernel}*final_hlo-static-per-bundle-utilization.txt"))
    if not files or not tables:
        raise ValueError(f"{folder} has no schedule of {kernel}")
    return parse_bundles(files[0].read_text(), tables[0].read_text())


def parse_bundles(listing: str, table: str) -> list[Bundle]:
    """Bundles from the compiler's listing and its table of use, a row for each."""
    rows = [tuple(map(int, line.split())) for line in table.splitlines() if re.match(r"^\s*\d", line)]
    rows = rows[1:]  # the first one is the capacity
    found: list[tuple[str, int, str]] = []
    for line in listing.splitlines():
        if match := _BUNDLE.match(line):
            label, marks, text = match.groups()
            depth = marks.count(">")
            # An empty bundle is printed without the marks of its loops.
            if depth == 0 and found and _TRIVIAL.match(text):
                depth = found[-1][1]
            found.append((label or "", depth, text))
        elif found:
            label, depth, text = found[-1]
            found[-1] = label, depth, text + line
    if len(found) != len(rows):
        raise ValueError(f"{len(found)} bundles in the listing and {len(rows)} in the table")
    depths = _without_dips([label for label, _, _ in found], [depth for _, depth, _ in found])
    return [
        Bundle(label, depth, text, row)
        for (label, _, text), depth, row in zip(found, depths, rows, strict=True)
    ]


def _without_dips(labels: Sequence[str], depths: Sequence[int]) -> list[int]:
    """Depths of loops in which a body goes on until the next one begins: some of its bundles, in which an
    instruction of the loop around it found room, are printed with that one's marks."""
    smooth = list(depths)
    for number in range(1, len(smooth)):
        if smooth[number] > smooth[number - 1] and labels[number] != "LB":
            earlier = number - 1
            while earlier >= 0 and smooth[earlier] < smooth[number] and smooth[earlier] > 0:
                smooth[earlier] = smooth[number]
                earlier -= 1
    return smooth


def working_loops(bundles: Sequence[Bundle]) -> list[Loop]:
    """The loops that use the matrix units themselves, in order."""
    loops: list[Loop] = []
    open_loops: list[list[int]] = []
    for number, bundle in enumerate(bundles):
        while len(open_loops) > bundle.depth:
            loops += _iteration(bundles, open_loops.pop())
        while len(open_loops) < bundle.depth:
            open_loops.append([])
        if bundle.label == "LB" and open_loops and open_loops[-1]:
            loops += _iteration(bundles, open_loops.pop())
            open_loops.append([])
        if open_loops:
            open_loops[-1].append(number)
    while open_loops:
        loops += _iteration(bundles, open_loops.pop())
    return loops


def _iteration(bundles: Sequence[Bundle], numbers: list[int]) -> list[Loop]:
    """The loop of these bundles if it works, without the branches in it that do not."""
    kept: list[Bundle] = []
    branch: list[Bundle] = []
    countdown = -1
    inside = False
    for number in numbers:
        bundle = bundles[number]
        if bundle.label == "PF":
            kept += branch if any(skipped.works for skipped in branch) else []
            branch, inside = [], False
        (branch if inside else kept).append(bundle)
        if "sbr.rel" in bundle.text:
            countdown = BRANCH_DELAY
        elif countdown > 0:
            countdown -= 1
        if countdown == 0:
            inside, countdown = True, -1
    kept += branch if any(skipped.works for skipped in branch) else []
    return [Loop(tuple(kept))] if any(bundle["MXU"] for bundle in kept) else []
