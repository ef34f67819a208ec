"""What the GPU kernels are worth on an H200: right or not, and how near they come to what the chip can do.

    python -m benchmarks.gpu_check --json benchmarks/results/gpu-check-h200.json
    python -m benchmarks.gpu_check --smallest    # the smallest case alone, interpreted where there is no GPU
    python -m benchmarks.gpu_check --compile     # the same programs through the GPU compiler, no GPU needed

First the numbers of the kernels, attention and products by quantised matrices, over the shared cases, beside
the reference's, both against double precision. Then times, each beside a peak that the same run measured:
decode attention (64 sequences of 4,096 tokens, 8 queries a kv head) and products of few rows in eight and
four bits against the bandwidth of a copy, prefill attention and products of many rows against the rate of a
product in bfloat16, with XLA's and cuDNN's attention, and XLA's products, on the same inputs.
What takes longer than the time that is left (`--seconds`, 8 minutes) is left out, and said so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_products
from benchmarks.machine import describe
from jaxserve.engine.machines import COMPILER_ENVIRONMENT, Machine
from pallas_kernels.dispatch import Target, default_target
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.quantised_matmul.cases import MatmulCase
from pallas_kernels.ragged_paged_attention import AttentionParams, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import (
    CASES,
    AttentionBatch,
    AttentionCase,
    exact_attention,
    make_batch,
)
from pallas_kernels.ragged_paged_attention.gpu import MAX_HEAD_SIZE

SEQUENCES, CONTEXT, KV_HEADS, QUERIES, HEAD_SIZE, PAGE_SIZE = 64, 4096, 8, 8, 128, 64
PROMPTS, PROMPT = 2, 4096
PRODUCT = 8192
"""Rows and columns of the matrices that measure the rate of products."""
COPIED_BYTES = 4 << 30
REPEATS, ROUNDS = 20, 5
WANTED = {"decode attention": 0.85, "prefill attention": 0.6, "few rows": 0.8}
"""Shares of the peak that were set out to be reached."""
SMALLEST = AttentionCase(64, 1, 2, "bfloat16", "", "bfloat16", 16, context_len=(70, 5), num_rows=(1, 1))


@dataclasses.dataclass(frozen=True)
class Timed:
    """A program to be timed, and what it must move or compute."""

    name: str
    run: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    bound: str
    """bytes or operations: by which of the peaks its amount is divided."""
    amount: float
    peer: bool = False
    """Whether it is someone else's, to compare with; its failure is no failure of ours."""


def main() -> None:
    """Read the command line, check, time, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--smallest", action="store_true", help="the smallest case alone")
    parser.add_argument("--compile", action="store_true", help="compile for an H200, run nothing")
    parser.add_argument("--seconds", type=float, default=450.0, help="most to take (450)")
    parser.add_argument("--json", type=Path, help="file to write what was found")
    arguments = parser.parse_args()
    if arguments.compile:
        if any(os.environ.get(name) != value for name, value in COMPILER_ENVIRONMENT.items()):
            # Which must be there before jax is first imported.
            command = [sys.executable, "-m", "benchmarks.gpu_check", "--compile"]
            raise SystemExit(
                subprocess.run(command, env=os.environ | COMPILER_ENVIRONMENT, check=False).returncode
            )
        compile_all()
        return
    started = time.monotonic()
    report: dict[str, Any] = {"machine": describe(), "device": jax.devices()[0].device_kind}
    target = dataclasses.replace(default_target(), overrides=(("ragged_paged_attention", "gpu"),))
    cases = [SMALLEST] if arguments.smallest else [SMALLEST, *gpu_cases()]
    report["numbers"] = [numbers(case, single, target) for case in cases for single in (True, False)]
    products = [gpu_products.SMALLEST] if arguments.smallest else gpu_products.cases()
    report["products"] = [gpu_products.numbers(case) for case in products]
    if not arguments.smallest:
        deadline = started + arguments.seconds
        report["times"] = times(timed_programs(target), deadline, lambda: write(report, arguments.json))
    report["seconds"] = round(time.monotonic() - started, 1)
    write(report, arguments.json)
    print(json.dumps(report, indent=1))
    checked = report["numbers"] + report["products"]
    raise SystemExit(0 if all(line["right"] for line in checked) else 1)


def write(report: dict[str, Any], path: Path | None) -> None:
    """Also in between, so that a run that is broken off leaves what it found."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def gpu_cases() -> list[AttentionCase]:
    """The shared cases in the formats that the kernel takes."""
    return [
        dataclasses.replace(
            case,
            storage="",
            compute="bfloat16",
            kv_format="bfloat16" if case.kv_format == "float32" else case.kv_format,
        )
        for case in CASES
        if case.head_size <= MAX_HEAD_SIZE
    ]


def numbers(case: AttentionCase, single: bool, target: Target) -> dict[str, Any]:
    """The largest errors of kernel and reference in a batch against double precision."""
    if single:
        number = len(case.context_len)
        case = dataclasses.replace(case, num_rows=(1,) * number, padded_rows=number)
    batch = make_batch(case)
    reference = dataclasses.replace(target, overrides=(("ragged_paged_attention", "reference"),))
    results = {
        name: np.asarray(attend(case, batch, single, device), np.float64)
        for name, device in (("kernel", target), ("reference", reference))
    }
    errors = dict.fromkeys(results, 0.0)
    for sequence, rows in enumerate(case.num_rows):
        for row in range(rows if case.context_len[sequence] else 0):
            expected = exact_attention(case, batch, sequence, row)
            place = int(batch.query_start_S1[sequence]) + row
            for name, result in results.items():
                errors[name] = max(errors[name], float(np.abs(result[place] - expected).max()))
    # Twice what the reference loses by the formats alone; more than a tenth would be no rounding any more.
    right = errors["kernel"] <= min(2 * errors["reference"] + 1e-5, 0.1)
    finite = bool(np.isfinite(results["kernel"]).all())
    return {"case": str(case), "single": single, "errors": errors, "right": right and finite}


def attend(case: AttentionCase, batch: AttentionBatch, single: bool, target: Target) -> jax.Array:
    @jax.jit
    def run(*arrays: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *arrays,
            layout=batch.layout,
            params=case.params(),
            single=single,
            sinks_H=batch.sinks_H,
            target=target,
        )

    return run(*batch.arguments)


def timed_programs(target: Target) -> list[Timed]:
    """All, the peaks first."""
    half = COPIED_BYTES // 2 // 4
    return [
        Timed(
            "copy",
            lambda x: x + 1.0,
            lambda: (jnp.zeros((half,), jnp.float32),),
            "bytes",
            COPIED_BYTES,
        ),
        Timed(
            "bfloat16 product",
            lambda a, b: a @ b,
            lambda: (random((PRODUCT, PRODUCT)), random((PRODUCT, PRODUCT))),
            "operations",
            2.0 * PRODUCT**3,
        ),
        *(decode(kv_format, target) for kv_format in ("bfloat16", "int8", "float8_e4m3fn")),
        *(decode_peer(name) for name in ("xla", "cudnn")),
        prefill(target),
        *(prefill_peer(name) for name in ("xla", "cudnn")),
        *(product(line, by, target) for line in gpu_products.TIMED for by in ("gpu", "reference")),
    ]


def random(shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16)


def paged(kv_format: str, sequences: int, tokens: int) -> tuple[PageLayout, Callable[[], tuple[Any, ...]]]:
    """A layout, and a pool, its scales and a table of random pages."""
    pages = tokens // PAGE_SIZE
    layout = PageLayout(PAGE_SIZE, KV_HEADS, HEAD_SIZE, sequences * pages, kv_format, kv_format)

    def make() -> tuple[Any, ...]:
        numbers = random((16, *layout.pool_shape(1)[1:])).astype(layout.storage)
        pool = jnp.tile(numbers, (layout.num_pages // 16, 1, 1))
        scales = jnp.full(layout.scales_shape(1), 0.01) if layout.quantised else None
        order = jax.random.permutation(jax.random.key(0), layout.num_pages)
        return pool, scales, order.reshape(sequences, pages).astype(jnp.int32)

    return layout, make


def decode(kv_format: str, target: Target) -> Timed:
    layout, make = paged(kv_format, SEQUENCES, CONTEXT)
    params = AttentionParams(HEAD_SIZE**-0.5)

    def run(q: jax.Array, pool: jax.Array, scales: jax.Array | None, table: jax.Array) -> jax.Array:
        starts = jnp.arange(SEQUENCES + 1, dtype=jnp.int32)
        return ragged_paged_attention(
            q,
            pool,
            scales,
            table,
            starts,
            jnp.full_like(starts[1:], CONTEXT),
            0,
            layout=layout,
            params=params,
            single=True,
            target=target,
        )

    return Timed(
        f"decode attention {kv_format}",
        run,
        lambda: (random((SEQUENCES, KV_HEADS * QUERIES, HEAD_SIZE)), *make()),
        "bytes",
        layout.num_bytes(1),
    )


def decode_peer(implementation: str) -> Timed:
    shape = SEQUENCES, CONTEXT, KV_HEADS, HEAD_SIZE

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, implementation=implementation)

    return Timed(
        f"decode attention of {implementation}, pages side by side",
        run,
        lambda: (random((SEQUENCES, 1, KV_HEADS * QUERIES, HEAD_SIZE)), random(shape), random(shape)),
        "bytes",
        4.0 * np.prod(shape),
        peer=True,
    )


def prefill_operations() -> float:
    """Of both products over the positions that causal rows see."""
    return 4.0 * HEAD_SIZE * KV_HEADS * QUERIES * PROMPTS * PROMPT * (PROMPT + 1) / 2


def prefill(target: Target) -> Timed:
    layout, make = paged("bfloat16", PROMPTS, PROMPT)
    params = AttentionParams(HEAD_SIZE**-0.5)

    def run(q: jax.Array, pool: jax.Array, _: None, table: jax.Array) -> jax.Array:
        starts = jnp.arange(PROMPTS + 1, dtype=jnp.int32) * PROMPT
        return ragged_paged_attention(
            q,
            pool,
            None,
            table,
            starts,
            jnp.full_like(starts[1:], PROMPT),
            0,
            layout=layout,
            params=params,
            single=False,
            target=target,
        )

    return Timed(
        "prefill attention",
        run,
        lambda: (random((PROMPTS * PROMPT, KV_HEADS * QUERIES, HEAD_SIZE)), *make()),
        "operations",
        prefill_operations(),
    )


def prefill_peer(implementation: str) -> Timed:
    shape = PROMPTS, PROMPT, KV_HEADS, HEAD_SIZE

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    return Timed(
        f"prefill attention of {implementation}, pages side by side",
        run,
        lambda: (random((PROMPTS, PROMPT, KV_HEADS * QUERIES, HEAD_SIZE)), random(shape), random(shape)),
        "operations",
        prefill_operations(),
        peer=True,
    )


def product(case: MatmulCase, by: str, target: Target) -> Timed:
    """By the kernel, or by XLA as it does the reference."""
    many = case.num_rows > max(gpu_products.FEW_ROWS)
    return Timed(
        gpu_products.name(case) + (" of xla" if by == "reference" else ""),
        functools.partial(gpu_products.multiply, case, gpu_products.by(by, target)),
        functools.partial(gpu_products.make, case),
        "operations" if many else "bytes",
        gpu_products.operations(case) if many else gpu_products.matrix_bytes(case),
        peer=by == "reference",
    )


def times(programs: list[Timed], deadline: float, save: Callable[[], None]) -> list[dict[str, Any]]:
    """A line for each program, its rate as a share of the peak that the run measured before."""
    peaks: dict[str, float] = {}
    lines: list[dict[str, Any]] = []
    for program in programs:
        line: dict[str, Any] = {"name": program.name, "bound": program.bound}
        lines.append(line)
        if time.monotonic() > deadline:
            line["left_out"] = "no time left"
            continue
        try:
            seconds = shortest(program)
        except Exception as failure:
            if not program.peer:
                raise
            line["failed"] = str(failure)[:300]
            continue
        rate = program.amount / seconds
        peak = peaks.setdefault(program.bound, rate)
        wanted = next((share for name, share in WANTED.items() if program.name.startswith(name)), None)
        line |= {"seconds": seconds, "rate": rate, "share_of_peak": rate / peak}
        if wanted is not None and not program.peer:
            line |= {"wanted": wanted}
        print(json.dumps(line), flush=True)
        save()
    return lines


def shortest(program: Timed) -> float:
    """Seconds of one run, the best of several rounds of many runs each."""
    arguments = program.arguments()
    compiled = jax.jit(program.run).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(REPEATS):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - started) / REPEATS)
    return best


def compile_all() -> None:
    """Each program but cuDNN's, which needs its library, for an H200."""
    with described() as (target, place):
        for program in timed_programs(target):
            if program.name.split(",")[0].endswith("cudnn"):
                continue
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                jax.eval_shape(program.arguments),
            )
            memory = jax.jit(program.run).lower(*shapes).compile().memory_analysis()
            line = {"name": program.name, "temporaries": memory.temp_size_in_bytes if memory else None}
            print(json.dumps(line), flush=True)


@contextlib.contextmanager
def described() -> Iterator[tuple[Target, Any]]:
    """An H200 that is not here, and a placing on it."""
    with Machine.parse("h200").mesh([("device", 1)]) as mesh:
        device = mesh.devices.flat[0]
        target = dataclasses.replace(Target.of(device), overrides=(("ragged_paged_attention", "gpu"),))
        yield target, jax.sharding.SingleDeviceSharding(device)


if __name__ == "__main__":
    main()
