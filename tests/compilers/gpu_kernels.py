"""Compile the GPU kernels for every case on an H200 that is not here.

    python -m tests.compilers.gpu_kernels

Prints a line of JSON for each case: of attention single rows and a mixed batch, and products by quantised
matrices. It has what the kernel takes of a multiprocessor, bytes of temporaries, and an error or null.
Needs the project's extra compilers-gpu.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxserve.engine.machines import COMPILER_ENVIRONMENT, Machine

if TYPE_CHECKING:
    from pallas_kernels.quantised_matmul.cases import MatmulCase
    from pallas_kernels.ragged_paged_attention.cases import AttentionCase

LENGTHS = (4096,) * 8
ROWS = 512
FURTHER = (
    # head size, queries of a kv head, format, page size, window
    (128, 8, "bfloat16", 16, 0),
    (128, 8, "bfloat16", 256, 0),
    (128, 4, "float8_e4m3fn", 16, 1024),
    (64, 8, "int8", 256, 0),
    (64, 1, "float8_e4m3fn", 128, 0),
    (256, 2, "int8", 16, 512),
    (256, 2, "float8_e4m3fn", 64, 0),
)


def main() -> None:
    """Compile all cases."""
    os.environ.update(COMPILER_ENVIRONMENT)
    from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase
    from pallas_kernels.ragged_paged_attention.gpu import MAX_HEAD_SIZE

    cases = [
        dataclasses.replace(
            case,
            storage="",
            compute="bfloat16",
            kv_format="bfloat16" if case.kv_format == "float32" else case.kv_format,
        )
        for case in CASES
        if case.head_size <= MAX_HEAD_SIZE
    ]
    cases += [
        AttentionCase(head_size, 2, queries, kv_format, "", "bfloat16", page_size, window)
        for head_size, queries, kv_format, page_size, window in FURTHER
    ]
    with Machine.parse("h200").mesh([("device", 1)]) as mesh:
        for case in cases:
            for single in (True, False):
                _report({"case": str(case), "single": single}, _attention(case, single, mesh))
        for case in matmul_cases():
            _report({"case": str(case)}, _product(case, mesh))


def matmul_cases() -> list[MatmulCase]:
    """Of every format matrices of real models, by one row to 8,192."""
    from pallas_kernels.quantised_matmul.cases import MatmulCase

    down = MatmulCase(8, 14336, 4096, num_layers=32)
    gate_up = dataclasses.replace(down, num_inputs=4096, num_outputs=28672)
    int4 = dataclasses.replace(down, storage="uint4x2", group=128, scale_type="bfloat16")
    fp8 = dataclasses.replace(gate_up, storage="float8_e4m3fn")
    return [
        dataclasses.replace(down, num_rows=1),
        dataclasses.replace(down, num_rows=64),
        dataclasses.replace(gate_up, num_rows=8192),
        dataclasses.replace(down, rows="int16"),
        dataclasses.replace(gate_up, rows="int16", num_rows=64),
        dataclasses.replace(gate_up, rows="int16", num_rows=2048),
        dataclasses.replace(gate_up, rows="int8", num_rows=1),
        dataclasses.replace(down, rows="int8", num_rows=8192),
        fp8,
        dataclasses.replace(fp8, num_rows=2048),
        dataclasses.replace(fp8, rows="float8_e4m3fn"),
        dataclasses.replace(fp8, rows="float8_e4m3fn", num_rows=64),
        dataclasses.replace(fp8, rows="float8_e4m3fn", num_rows=8192),
        dataclasses.replace(fp8, group=128, scale_type="bfloat16"),
        int4,
        dataclasses.replace(int4, group=32, num_rows=64, zeros=True),
        dataclasses.replace(int4, num_rows=2048, zeros=True),
        MatmulCase(3, 576, 192, rows="int16"),
    ]


def _report(line: dict[str, Any], compile: Callable[[], Any]) -> None:
    from jaxserve.engine.kernel_resources import kernels_recorded

    error, temporaries = None, 0
    with kernels_recorded() as read:
        try:
            memory = compile().memory_analysis()
            temporaries = memory.temp_size_in_bytes if memory else 0
        except Exception as failure:  # whatever it is, it is what is asked for
            error = str(failure)[:500]
    kernels = [kernel.as_json() for kernel in read()]
    print(json.dumps(line | {"kernels": kernels, "temporaries": temporaries, "error": error}), flush=True)


def _product(case: MatmulCase, mesh: Any) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.dispatch import Target
    from pallas_kernels.quantised_matmul import quantised_matmul

    device = mesh.devices.flat[0]
    target = dataclasses.replace(Target.of(device), overrides=(("quantised_matmul", "gpu"),))
    place = jax.sharding.SingleDeviceSharding(device)

    def multiply(*operands: jax.Array, layer: jax.Array) -> jax.Array:
        x, values, scales, zeros, row_scale_T = operands
        return quantised_matmul(
            x, values, scales, zeros, layer, row_scale_T=row_scale_T, out_type=jnp.bfloat16, target=target
        )

    def placed(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

    shapes, layer = jax.tree.map(placed, case.shapes()), placed(jax.ShapeDtypeStruct((), jnp.int32))
    return lambda: jax.jit(multiply).lower(*shapes, layer=layer).compile()


def _attention(case: AttentionCase, single: bool, mesh: Any) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.dispatch import Target
    from pallas_kernels.ragged_paged_attention import ragged_paged_attention

    layout = case.layout()
    target = dataclasses.replace(
        Target.of(mesh.devices.flat[0]), overrides=(("ragged_paged_attention", "gpu"),)
    )
    place = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])

    def operand(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    number = len(LENGTHS)
    operands = (
        operand((number if single else ROWS, case.num_heads, case.head_size), case.compute),
        operand((4096, *layout.pool_shape(1)[1:]), layout.storage),
        operand((4096, *layout.scales_shape(1)[1:]), jnp.float32) if layout.quantised else None,
        operand((number, max(LENGTHS) // case.page_size), jnp.int32),
        operand((number + 1,), jnp.int32),
        operand((number,), jnp.int32),
    )

    def attend(*arrays: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *arrays,
            0,
            layout=layout,
            params=case.params(),
            single=single,
            sinks_H=jnp.ones(case.num_heads) if case.sinks else None,
            target=target,
        )

    return lambda: jax.jit(attend).lower(*operands).compile()


if __name__ == "__main__":
    main()
