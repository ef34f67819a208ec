"""Products by quantised matrices, as `benchmarks.tpu_schedule` compiles them, XLA's own beside ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bundles import Bundle, Loop, read_bundles, working_loops

NUM_INPUTS, NUM_OUTPUTS, NUM_LAYERS = 4096, 14336, 8
REGISTER_WEIGHTS = 16 * 128
"""Of bfloat16, which the matrix unit takes at a time; of float32 half as many."""
PUSH = re.compile(r"= (vmat(?:push|prep\.subr)\S*)")


@dataclass(frozen=True)
class MatmulShape:
    """What is compiled."""

    format: str
    num_rows: int
    peer: bool = False
    """XLA's own product of the widened slice."""

    @property
    def name(self) -> str:
        return f"{self.format} x {self.num_rows}{' peer' if self.peer else ''}"

    @property
    def prefill(self) -> bool:
        """Whether arithmetic is the limit, and not the matrix's bytes."""
        return self.num_rows > 64


FORMATS = ("int8", "int8-weight-only", "fp8", "int4-128", "int4-32")
SHAPES = (
    *(MatmulShape(format, num_rows) for format in FORMATS for num_rows in (8, 64, 2048)),
    *(MatmulShape("int8-weight-only", num_rows, peer=True) for num_rows in (8, 64)),
)


@dataclass(frozen=True)
class Work:
    """What the schedule of a product says."""

    listed: int
    bundles: int
    """Executed for one tile of the matrix; of the peer, and of many rows, in one iteration of its loop."""
    tile_bytes: int
    operations: int
    loop: Loop


def program(shape: MatmulShape, device: Any) -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]:
    """A function, and its operands' shapes and types."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.dispatch import Target
    from pallas_kernels.quantised_matmul import tpu

    target = Target.of(device)

    def ours(x: Any, values: Any, scales: Any, layer: Any, *row_scale: Any) -> Any:
        row_scale_T = row_scale[0] if row_scale else None
        return tpu.multiply_tpu(
            x,
            values,
            scales,
            None,
            layer,
            row_scale_T,
            out_type=jnp.bfloat16,
            target=target,
            interpret=False,
        )

    def peer(x: Any, values: Any, scales: Any, layer: Any) -> Any:
        contracted = (((1,), (1,)), ((), ()))
        own = values[layer].astype(x.dtype)
        sums = jax.lax.dot_general(x, own, contracted, preferred_element_type=jnp.float32)
        return (sums * scales[layer][None]).astype(x.dtype)

    integer = shape.format == "int8"
    operands = [
        ((shape.num_rows, NUM_INPUTS), jnp.dtype("int16") if integer else jnp.dtype("bfloat16")),
        *(_matrix(shape)),
        ((), jnp.dtype("int32")),
        *([((shape.num_rows,), jnp.dtype("float32"))] if integer else []),
    ]
    return (peer if shape.peer else ours), operands


def _matrix(shape: MatmulShape) -> list[tuple[tuple[int, ...], Any]]:
    """Values and scales."""
    import jax.numpy as jnp

    base, _, group = shape.format.partition("-")
    whole = NUM_LAYERS, NUM_OUTPUTS, NUM_INPUTS
    if base == "int4":
        groups = NUM_INPUTS // int(group)
        by_group = (NUM_LAYERS, groups, NUM_OUTPUTS), jnp.dtype("bfloat16")
        return [((*whole[:2], NUM_INPUTS // 2), jnp.dtype("uint8")), by_group]
    storage = jnp.dtype("float8_e4m3fn" if base == "fp8" else "int8")
    return [(whole, storage), (whole[:2], jnp.dtype("float32"))]


def work_of(shape: MatmulShape, device: Any, folder: Path) -> Work:
    """From the compiler's dumps."""
    if shape.peer:
        bundles, loop = _busiest(folder)
        pushes = [found[1] for bundle in loop.bundles for found in PUSH.finditer(bundle.text)]
        pushed = sum(REGISTER_WEIGHTS if "bf16" in push else REGISTER_WEIGHTS // 2 for push in pushes)
        return Work(len(bundles), len(loop), pushed, 0, loop)
    import jax

    from pallas_kernels.dispatch import Target
    from pallas_kernels.quantised_matmul import tpu, tpu_few, tpu_many
    from pallas_kernels.quantised_matmul.tpu_tiles import Matrix

    _, operands = program(shape, device)
    values, scales = (jax.ShapeDtypeStruct(*operand) for operand in operands[1:3])
    matrix = Matrix(values, scales, None, NUM_INPUTS)
    sizes = tpu.choose_sizes(shape.num_rows, matrix, Target.of(device))
    bundles = read_bundles(folder, "quantised_matmul")
    inner = [bundle for bundle in bundles if bundle.depth > 1]
    if sizes.many:
        loop = max(working_loops(bundles), key=lambda loop: loop.total("MXU"))
        planes = 2 if shape.format == "int8" else 1
        operations = 2 * planes * sizes.rows * sizes.outputs * tpu_many.MULTIPLY_LANES
        return Work(len(bundles), len(loop), 0, operations, loop)
    tile_bytes = sizes.outputs * values.shape[2] * values.dtype.itemsize
    tile_bytes += matrix.num_groups * sizes.outputs * scales.dtype.itemsize
    # A loop of one trip is none.
    outer = [bundle for bundle in bundles if bundle.depth == 1]
    executed = len(outer) + tpu_few.trips(matrix, sizes) * len(inner)
    return Work(len(bundles), executed, tile_bytes, 0, Loop(tuple(inner or outer)))


def _busiest(folder: Path) -> tuple[Sequence[Bundle], Loop]:
    """Of XLA's fusions the one that keeps the matrix units busiest, and its loop."""
    names = {path.name.split("-")[1] for path in folder.glob("*fusion*-final_bundles.txt")}
    found = [read_bundles(folder, name) for name in sorted(names)]
    bundles = max(found, key=lambda bundles: sum(bundle["MXU"] for bundle in bundles))
    return bundles, max(working_loops(bundles), key=lambda loop: loop.total("MXU"))
