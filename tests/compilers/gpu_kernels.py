"""Compile the attention kernel for every case on an H200 that is not here.

    python -m tests.compilers.gpu_kernels

Prints a line of JSON for each case, of single rows and of a mixed batch: registers of a thread, bytes that it
spills, bytes of temporaries, and an error or null.
Needs the project's extra compilers-gpu.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxserve.engine.machines import COMPILER_ENVIRONMENT, Machine

if TYPE_CHECKING:
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
)


def main() -> None:
    """Compile all cases."""
    os.environ.update(COMPILER_ENVIRONMENT, MOSAIC_GPU_DUMP_PTXAS="1")
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
                with _standard_output() as read:
                    error, temporaries = _compile(case, single, mesh)
                report = read()
                line = {
                    "case": str(case),
                    "single": single,
                    "registers": _most(r"Used (\d+) registers", report),
                    "spilled": _most(r"(\d+) bytes spill stores", report),
                    "temporaries": temporaries,
                    "error": error,
                }
                print(json.dumps(line), flush=True)


def _compile(case: AttentionCase, single: bool, mesh: Any) -> tuple[str | None, int]:
    """What went wrong, and the temporaries' bytes."""
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

    try:
        memory = jax.jit(attend).lower(*operands).compile().memory_analysis()
    except Exception as failure:  # whatever it is, it is what is asked for
        return str(failure)[:500], 0
    return None, memory.temp_size_in_bytes if memory else 0


@contextlib.contextmanager
def _standard_output() -> Iterator[Callable[[], str]]:
    """Yields what reads, afterwards, all that the process wrote to its standard output inside."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        text: list[str] = []
        try:
            yield lambda: text[0]
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            text.append(file.read().decode())


def _most(pattern: str, report: str) -> int | None:
    """The largest of some numbers; None where there is none."""
    return max(map(int, re.findall(pattern, report)), default=None)


if __name__ == "__main__":
    main()
