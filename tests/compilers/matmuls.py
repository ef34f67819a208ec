"""Compile the multiplication by quantised matrices for TPUs that are not here.

    python -m tests.compilers.matmuls v5e v5p v6e

Prints a line of JSON for each: seconds, bytes of temporaries, and an error or null. For the last chip every
case of the tests, for each one matrices of real models by one row to 8,192.
Needs libtpu: the project's extra compilers-tpu.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from jaxserve.engine.machines import COMPILER_ENVIRONMENT, Machine

if TYPE_CHECKING:
    from pallas_kernels.quantised_matmul.cases import MatmulCase


def main() -> None:
    """Read the chips' names from the command line; compile."""
    os.environ.update(COMPILER_ENVIRONMENT)
    from pallas_kernels.quantised_matmul.cases import CASES, MatmulCase

    down = MatmulCase(8, 14336, 4096, num_layers=32)
    int4 = dataclasses.replace(down, storage="uint4x2", group=32, scale_type="bfloat16")
    real = (
        dataclasses.replace(down, num_rows=1),
        dataclasses.replace(down, num_rows=64, rows="int16"),
        dataclasses.replace(down, num_rows=8192, rows="int16"),
        dataclasses.replace(down, num_rows=8192, storage="float8_e4m3fn"),
        dataclasses.replace(int4, zeros=True),
        dataclasses.replace(int4, num_rows=8192),
        dataclasses.replace(int4, num_rows=64, num_inputs=4096, num_outputs=28672, group=128),
        dataclasses.replace(down, num_rows=2048, num_inputs=4096, num_outputs=28672, rows="int8"),
        MatmulCase(2048, 28672, 8192, "float8_e4m3fn", num_layers=8),
    )
    taken = [case for case in CASES if case.rows != "float8_e4m3fn"]  # Such rows are for GPU alone.
    *others, last = sys.argv[1:]
    for chip in (*others, last):
        for case in (*real, *(taken if chip == last else ())):
            print(json.dumps(compile_case(chip, case)), flush=True)


def compile_case(chip: str, case: MatmulCase) -> dict[str, object]:
    """What the compiler says of one."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.dispatch import Target
    from pallas_kernels.quantised_matmul import quantised_matmul

    with Machine.parse(chip).mesh([("device", 1)]) as mesh:
        device = mesh.devices.flat[0]
        target = Target(
            "tpu", device.device_kind, num_cores=device.num_cores, overrides=(("quantised_matmul", "tpu"),)
        )
        place = jax.sharding.SingleDeviceSharding(device)

        def multiply(*operands: jax.Array, layer: jax.Array) -> jax.Array:
            x, values, scales, zeros, row_scale_T = operands
            out_type = jnp.bfloat16 if case.integer else jnp.dtype(case.rows)
            return quantised_matmul(
                x, values, scales, zeros, layer, row_scale_T=row_scale_T, out_type=out_type, target=target
            )

        def placed(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

        shapes = jax.tree.map(placed, case.shapes())
        layer = placed(jax.ShapeDtypeStruct((), jnp.int32))
        started, error, temporaries = time.monotonic(), None, 0
        try:
            memory = jax.jit(multiply).lower(*shapes, layer=layer).compile().memory_analysis()
            temporaries = memory.temp_size_in_bytes if memory else 0
        except Exception as failure:  # whatever it is, it is what is asked for
            error = str(failure)[:500]
    return {
        "chip": chip,
        "case": str(case),
        "rows": case.num_rows,
        "seconds": round(time.monotonic() - started, 1),
        "temporaries": temporaries,
        "error": error,
    }


if __name__ == "__main__":
    main()
