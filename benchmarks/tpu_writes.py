"""Keys and values on their way into pages, as `benchmarks.tpu_schedule` compiles it: XLA's scatter, ours.

Counted are the bundles of what writes: of our kernel, and of XLA's scatters of numbers and of scales. XLA's
wait for memory twice in each iteration, which no count of bundles shows; ours has other tiles on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bundles import Bundle, Loop, read_bundles

NUM_KV_HEADS, HEAD_SIZE, PAGE_SIZE = 8, 128, 64
NUM_PAGES = 30000
"""A pool whose scales fit into no vector memory: XLA scatters into those that do in another way."""
SCATTERED_AT_ONCE = 16
"""Rows of 128 numbers, or scales, that an iteration of XLA's scatter takes: so many copies it begins."""


@dataclass(frozen=True)
class WriteShape:
    """What is compiled."""

    kv_format: str
    num_rows: int
    peer: bool = False
    """XLA's scatter."""

    @property
    def name(self) -> str:
        return f"write {self.kv_format} x {self.num_rows}{' peer' if self.peer else ''}"

    @property
    def prefill(self) -> bool:
        return False


SHAPES = tuple(
    WriteShape(kv_format, 64, peer)
    for kv_format in ("bfloat16", "int8", "float8_e4m3fn")
    for peer in (False, True)
)


@dataclass(frozen=True)
class Work:
    """What the schedule says of all rows."""

    listed: int
    bundles: int
    """Executed."""
    tile_bytes: int
    """Of the memory tiles in which the rows lie, read and written."""
    loop: Loop


def _layout(shape: WriteShape) -> Any:
    from pallas_kernels.page_layout import PageLayout

    return PageLayout(PAGE_SIZE, NUM_KV_HEADS, HEAD_SIZE, NUM_PAGES, shape.kv_format, shape.kv_format)


def program(shape: WriteShape) -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]:
    """A function, and its operands' shapes and types; the first are the pool's, to be donated."""
    import jax.numpy as jnp

    from pallas_kernels.dispatch import Target
    from pallas_kernels.kv_write import kv_write

    layout = _layout(shape)
    target = Target("tpu", overrides=(("kv_write", "reference" if shape.peer else "tpu"),))

    def write(pool: Any, *operands: Any) -> Any:
        scales, rest = (operands[0], operands[1:]) if layout.quantised else (None, operands)
        return kv_write(pool, scales, *rest, layout=layout, target=target)

    new = (shape.num_rows, NUM_KV_HEADS, HEAD_SIZE), jnp.bfloat16
    place = (shape.num_rows,), jnp.int32
    scales = [(layout.scales_shape(2), jnp.float32)] if layout.quantised else []
    return write, [(layout.pool_shape(2), jnp.dtype(layout.storage)), *scales, new, new, place, place]


def work_of(shape: WriteShape, folder: Path) -> Work:
    """From the compiler's dumps."""
    from pallas_kernels.kv_write.tpu import tile_rows

    layout = _layout(shape)
    planes = NUM_KV_HEADS * layout.planes
    item = 4 // (tile_rows(layout) // 8)
    tile_bytes = planes * tile_rows(layout) * 128 * item + (
        4 * layout.scale_rows * 128 if layout.quantised else 0
    )
    moved = 2 * shape.num_rows * tile_bytes
    if not shape.peer:
        bundles = read_bundles(folder, "kv_write")
        loop = max(_parts(bundles), key=len)
        outside = [bundle for bundle in bundles if bundle.depth == 0]
        executed = len(outside) + shape.num_rows * len(loop)
        return Work(len(bundles), executed, moved, Loop(loop))
    names = sorted({path.name.split("-")[1] for path in folder.glob("*scatter*-final_bundles.txt")})
    executed, listed, inner = 0, 0, []
    for name in names:
        bundles = read_bundles(folder, f"{name}-")
        listed += len(bundles)
        body = [bundle for bundle in bundles if bundle.depth > 1]
        inner += body
        executed += shape.num_rows * planes // SCATTERED_AT_ONCE * len(body)
    return Work(listed, executed, moved, Loop(tuple(inner)))


def _parts(bundles: Sequence[Bundle]) -> Iterator[tuple[Bundle, ...]]:
    """The bodies of loops, one after the other."""
    part: list[Bundle] = []
    for bundle in bundles:
        if part and (bundle.depth != part[-1].depth or bundle.label == "LB"):
            yield tuple(part)
            part = []
        if bundle.depth:
            part.append(bundle)
    yield tuple(part)
