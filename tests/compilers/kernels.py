"""Compile the attention kernels for every case on a TPU that is not here.

    python -m tests.compilers.kernels v6e

Prints a line of JSON for each case, of single rows and of a mixed batch: seconds, bytes of temporaries, and
an error or null.
Needs libtpu: the project's extra compilers-tpu.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time

from jaxserve.engine.machines import COMPILER_ENVIRONMENT, Machine

LENGTHS = (4096,) * 8
NUM_ROWS = (1, 1, 200, 4, 0, 300, 1, 1)
ROWS = 512
MIXED_HEAD_SIZES = (64, 128)
"""Of which mixed batches too are compiled; they take three times as long."""
FURTHER_PAGE_SIZES = (("bfloat16", 16), ("bfloat16", 128), ("bfloat16", 256), ("int8", 256), ("float32", 16))


def main() -> None:
    """Read the chip's name from the command line; compile."""
    os.environ.update(COMPILER_ENVIRONMENT)
    import jax
    import jax.numpy as jnp

    from pallas_kernels.dispatch import Target
    from pallas_kernels.ragged_paged_attention import ragged_paged_attention
    from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase

    further = [
        AttentionCase(128, 1, 4, kv_format, compute="bfloat16", page_size=page_size)
        for kv_format, page_size in FURTHER_PAGE_SIZES
    ]
    with Machine.parse(sys.argv[1]).mesh([("device", 1)]) as mesh:
        device = mesh.devices.flat[0]
        target = dataclasses.replace(Target.of(device), overrides=(("ragged_paged_attention", "tpu"),))
        place = jax.sharding.SingleDeviceSharding(device)
        for case in (*CASES, *further):
            if case.storage or (case.kv_format == "int8" and case.page_size < 64):
                continue  # which the kernels do not take
            case = dataclasses.replace(case, context_len=LENGTHS)  # noqa: PLW2901
            for single in (True, False) if case.head_size in MIXED_HEAD_SIZES else (True,):
                layout = case.layout()
                rows = len(LENGTHS) if single else ROWS
                scales = (layout.scales_shape(2), jnp.float32) if layout.quantised else None
                operands = (
                    ((rows, case.num_heads, case.head_size), case.compute),
                    (layout.pool_shape(2), layout.storage),
                    scales,
                    ((len(LENGTHS), max(LENGTHS) // case.page_size), jnp.int32),
                    ((len(LENGTHS) + 1,), jnp.int32),
                    ((len(LENGTHS),), jnp.int32),
                )
                shapes = [
                    None if operand is None else jax.ShapeDtypeStruct(operand[0], operand[1], sharding=place)
                    for operand in operands
                ]

                def attend(
                    *arrays: jax.Array, case: AttentionCase = case, single: bool = single
                ) -> jax.Array:
                    return ragged_paged_attention(
                        *arrays,
                        0,
                        layout=case.layout(),
                        params=case.params(),
                        single=single,
                        sinks_H=jnp.ones(case.num_heads) if case.sinks else None,
                        target=target,
                    )

                started, error, temporaries = time.monotonic(), None, 0
                try:
                    memory = jax.jit(attend).lower(*shapes).compile().memory_analysis()
                    temporaries = memory.temp_size_in_bytes if memory else 0
                except Exception as failure:  # whatever it is, it is what is asked for
                    error = str(failure)[:500]
                line = {
                    "case": str(case),
                    "single": single,
                    "seconds": round(time.monotonic() - started, 1),
                    "temporaries": temporaries,
                    "error": error,
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
