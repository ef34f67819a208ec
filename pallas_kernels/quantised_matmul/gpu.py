"""Rows times a quantised matrix of a stack on GPUs of the Hopper generation.

Axes beyond those of `gpu_tiles`: I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target, mosaic_gpu_missing
from pallas_kernels.int8_matmul.reference import split_halves
from pallas_kernels.quantised_matmul.nibbles import PAIR_DISTANCE
from pallas_kernels.quantised_matmul.reference import index_in, with_bias

if TYPE_CHECKING:
    from pallas_kernels.quantised_matmul.gpu_tiles import Sizes

ROW_TYPES = ("bfloat16", "int8", "int16", "float8_e4m3fn")
OUTPUT_STEP = 64
"""What outputs must be a multiple of."""
FETCHED_BYTES = 128, 64, 32
"""Of an output, at a time: the most that divides its bytes and, where there are groups, their inputs."""
MAX_FEW_ROWS = 64
"""Rows up to which inputs are cut into parts, where there are too few tiles for all multiprocessors."""
MULTIPROCESSORS = 132
"""Of an H100 or H200."""
MIN_PART_STEPS = 4
"""Steps over inputs that are worth a thread block of their own."""
MAX_SUMS = 256
"""Of rows, by 64 outputs and by plane: what a warpgroup has registers for."""
MAX_APART = 128
"""The same where there are two sums, one for each step."""
SHARED_BYTES = 220 << 10
"""Of a multiprocessor's 227 KiB, what the ring of buffers and the staged result may take."""
MIN_BUFFERS, MAX_BUFFERS = 3, 16


def obstacle(
    rows: tuple[tuple[int, ...], str],
    values: tuple[tuple[int, ...], str],
    num_groups: int,
    has_zeros: bool,
    capability: str | None = None,
    **_: object,
) -> str | None:
    """Why the kernel cannot multiply, or None.

    Args:
        capability: of the GPU that is traced for, "9.0" say; None where the kernel is interpreted.
    """
    num_inputs, row_type = rows[0][1], rows[1]
    num_outputs, num_bytes = values[0][1:]
    packed = values[1] == "uint8"
    foreign = capability is not None and not capability.startswith("9.")
    group = num_inputs // num_groups if num_groups else 0
    reasons = (
        (foreign, f"it is made for compute capability 9.0, not {capability or 'an unknown one'}"),
        (row_type not in ROW_TYPES, f"rows of {row_type}"),
        (num_outputs % OUTPUT_STEP, f"{num_outputs} outputs are no multiple of {OUTPUT_STEP}"),
        (num_bytes % 64, f"outputs of {num_bytes} bytes are no multiple of 64"),
        (packed and num_bytes % PAIR_DISTANCE, f"{num_inputs} inputs are no multiple of {2 * PAIR_DISTANCE}"),
        (
            (packed or has_zeros) and not num_groups,
            "numbers of four bits, or zeros, with one scale a channel",
        ),
        (group % FETCHED_BYTES[-1], f"groups of {group} inputs are no multiple of {FETCHED_BYTES[-1]}"),
    )
    return next((reason for holds, reason in reasons if holds), None) or mosaic_gpu_missing()


def outdone(
    rows: tuple[tuple[int, ...], str], values: tuple[tuple[int, ...], str], **_: object
) -> str | None:
    """Why XLA's product is taken to be faster, or None."""
    # Nothing of this has been measured on a GPU yet; `benchmarks.gpu_check` compares both. XLA multiplies few
    # rows as 64 and reads a matrix of eight bits as it lies, so that at many rows cuBLAS is the one to beat;
    # one of four bits it writes out widened, in every step (`tests.compilers.quantised_step h200 int4`).
    num_rows = rows[0][0]
    if num_rows <= MAX_FEW_ROWS or values[1] == "uint8":
        return None
    return f"{num_rows} rows exceed {MAX_FEW_ROWS}, from where XLA is not known to be slower"


def multiply_gpu(
    x_TI: jax.Array,
    values_LOI: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    layer: jax.Array | int,
    row_scale_T: jax.Array | None,
    *,
    out_type: Any,
    target: Target,
    interpret: bool,
    bias_LO: jax.Array | None = None,
    sizes: Sizes | None = None,
) -> jax.Array:
    """See `quantised_matmul`. Sizes are for tests and tuning."""
    if bias_LO is not None:
        settings = {"out_type": jnp.float32, "target": target, "interpret": interpret, "sizes": sizes}
        out_TO = multiply_gpu(x_TI, values_LOI, scales, zeros, layer, row_scale_T, **settings)
        return with_bias(out_TO, bias_LO, layer, out_type)
    from pallas_kernels.mosaic_gpu import interpreter
    from pallas_kernels.quantised_matmul.gpu_tiles import Numbers, multiply_tiles

    num_rows, num_inputs = x_TI.shape
    num_groups = scales.shape[1] if scales.ndim == 3 else 0
    numbers = Numbers(
        halves=2 if values_LOI.dtype == jnp.uint8 else 1,
        group=num_inputs // num_groups if num_groups else 0,
        has_zeros=zeros is not None,
        widened=row_scale_T is None,
        integer=x_TI.dtype in (jnp.int8, jnp.int16),
        out_type=jnp.dtype(out_type),
    )
    num_planes = 2 if x_TI.dtype == jnp.int16 else 1
    sizes = sizes or choose_sizes(num_rows, num_planes, values_LOI.shape, x_TI.dtype, numbers)
    padding = -num_rows % sizes.rows
    x_TI = jnp.pad(x_TI, ((0, padding), (0, 0)))
    x_PTI = (split_halves(x_TI) if num_planes == 2 else x_TI).reshape(num_planes, *x_TI.shape)
    out = multiply_tiles(
        jnp.asarray(layer, jnp.int32).reshape(1),
        x_PTI,
        None if row_scale_T is None else jnp.pad(row_scale_T, (0, padding)),
        values_LOI,
        scales,
        zeros,
        numbers=numbers,
        sizes=sizes,
        interpret=interpreter() if interpret else None,
    )
    if sizes.num_parts == 1:
        return out[:num_rows]
    sums_PTO = jnp.sum(out, axis=0)
    sums_TO = sums_PTO[0] if num_planes == 1 else sums_PTO[0] * 128 + sums_PTO[1]
    sums_TO = sums_TO[:num_rows].astype(jnp.float32)
    if not num_groups:
        scale = jax.lax.dynamic_index_in_dim(scales, index_in(scales, layer), 0)
        sums_TO = sums_TO * (scale if row_scale_T is None else row_scale_T[:, None] * scale)
    return sums_TO.astype(out_type)


def choose_sizes(
    num_rows: int, num_planes: int, shape: tuple[int, ...], row_type: Any, numbers: Any
) -> Sizes:
    """Tiles for so many rows."""
    from pallas_kernels.quantised_matmul.gpu_tiles import Sizes

    _, num_outputs, row_bytes = shape
    apart = not numbers.widened and not numbers.integer
    most_rows = (MAX_APART if apart else MAX_SUMS) // (2 * num_planes)
    step = 8 if num_rows <= MAX_FEW_ROWS else 16
    row_tiles = -(-num_rows // most_rows)
    rows = -(-num_rows // (row_tiles * step)) * step
    units = num_outputs // OUTPUT_STEP
    num_warpgroups = 1 if units % 2 else 2
    outputs = OUTPUT_STEP * (2 if units % 4 == 0 else 1)
    num_bytes, num_buffers = 0, 0
    for num_bytes in FETCHED_BYTES:
        if row_bytes % num_bytes or numbers.group % num_bytes:
            continue
        # A row of 16 bits is a number, or a plane's byte twice.
        x_bytes = numbers.halves * rows * num_bytes * jnp.dtype(row_type).itemsize
        scale_bytes = numbers.halves * (4 + numbers.has_zeros) * bool(numbers.group)
        stage = num_warpgroups * outputs * (num_bytes + scale_bytes) + x_bytes
        num_buffers = min(MAX_BUFFERS, (SHARED_BYTES - num_warpgroups * OUTPUT_STEP * rows * 4) // stage)
        if num_buffers >= MIN_BUFFERS:
            break
    num_parts = 1
    if num_rows <= MAX_FEW_ROWS:
        tiles = num_outputs // (num_warpgroups * outputs)
        num_parts = max(1, min(MULTIPROCESSORS // tiles, row_bytes // num_bytes // MIN_PART_STEPS))
    return Sizes(rows, num_warpgroups, outputs, num_bytes, num_buffers, num_parts)
