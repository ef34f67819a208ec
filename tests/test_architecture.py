"""The house rules: imports point one way, and no file is a dumping ground."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxserve", "pallas_kernels", "sharding", "server")
MAX_LINES = 400
MAX_KERNEL_LINES = 600

FORBIDDEN = {
    "pallas_kernels": ("jaxserve", "sharding", "server"),
    "sharding": ("jaxserve", "pallas_kernels", "server"),
    "jaxserve": ("server",),
    "jaxserve/scheduling": (
        "jax",
        "jaxserve.engine",
        "jaxserve.model",
        "jaxserve.weights",
        "jaxserve.text",
        "jaxserve.loop",
    ),
    "jaxserve/planning": ("jax", "jaxserve.engine", "jaxserve.text"),
    "jaxserve/speculation": ("jax", "jaxserve.engine", "jaxserve.scheduling", "jaxserve.loop"),
    "jaxserve/structured": ("jax", "jaxserve.engine", "jaxserve.scheduling", "jaxserve.loop"),
    "jaxserve/engine": ("jaxserve.scheduling", "jaxserve.loop", "jaxserve.text"),
    "jaxserve/model": ("jaxserve.engine", "jaxserve.scheduling", "jaxserve.weights", "jaxserve.text"),
    "jaxserve/evaluation": ("jaxserve.scheduling", "jaxserve.commands"),
    "jaxserve/bench": ("jax", "jaxserve.engine", "jaxserve.loop", "jaxserve.llm", "jaxserve.commands"),
    "jaxserve/weights": ("jax", "jaxserve.engine", "jaxserve.scheduling", "jaxserve.text"),
    "jaxserve/quantization": (
        "jaxserve.engine",
        "jaxserve.model",
        "jaxserve.scheduling",
        "jaxserve.loop",
        "jaxserve.text",
        "jaxserve.weights",
    ),
    "jaxserve/text": ("jax", "jaxserve.engine", "jaxserve.scheduling", "jaxserve.model", "jaxserve.weights"),
    "jaxserve/plan.py": ("jax", "jaxserve"),
    "jaxserve/config.py": ("jax", "jaxserve"),
    "jaxserve/loop.py": ("jax", "jaxserve.engine", "jaxserve.model", "jaxserve.weights", "jaxserve.text"),
}
"""What the files under each path may not import; a name stands for itself and all below it."""

TESTS_AND_BENCHMARKS = ("tests", "benchmarks")


def product_files() -> list[Path]:
    """What people write: generated modules aside."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in files if "_pb2" not in path.stem]


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            yield node.module


def is_below(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_point_one_way(place: str) -> None:
    target = ROOT / place
    files = [target] if target.suffix else sorted(target.rglob("*.py"))
    assert files
    for path in files:
        for module in imports(path):
            for name in FORBIDDEN[place]:
                assert not is_below(module, name), f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_product_imports_no_test_and_no_benchmark(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for module in imports(path):
            assert module.split(".")[0] not in TESTS_AND_BENCHMARKS, f"{path} imports {module}"


def test_nothing_but_its_command_imports_the_evaluation() -> None:
    for path in product_files():
        place = path.relative_to(ROOT).as_posix()
        if place == "jaxserve/commands/evaluate.py" or place.startswith("jaxserve/evaluation/"):
            continue
        for module in imports(path):
            assert not is_below(module, "jaxserve.evaluation"), f"{place} imports {module}"


def test_the_map_of_modules_has_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in product_files():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        graph[name.removesuffix(".__init__")] = set(imports(path))
    names = set(graph)
    edges = {name: {target for target in targets if target in names} for name, targets in graph.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(names):
        visit(name, ())


def test_no_file_is_a_dumping_ground() -> None:
    for path in product_files():
        limit = MAX_KERNEL_LINES if path.is_relative_to(ROOT / "pallas_kernels") else MAX_LINES
        num_lines = len(path.read_text().splitlines())
        assert num_lines <= limit, f"{path.relative_to(ROOT)} has {num_lines} lines; the limit is {limit}"
