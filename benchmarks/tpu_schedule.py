"""The time that kernels take on TPUs, read from the compiler's final schedules; no TPU needed.

    python -m benchmarks.tpu_schedule [v5e v5p v6e] [--only decode] [--json]

The kernels are compiled for each chip in a process of its own, JAX's ragged_paged_attention and XLA's
products beside ours on the same shapes. A line says for one iteration of the inner loop: how many bundles it
executes, how many of them keep the matrix units busy, register spills and fills, and how long that takes
against the time in which HBM delivers the pages that the iteration reads (decode), or how many operations it
does a bundle (prefill). Of a product by a quantised matrix (`int4-32 x 8`: by so many rows) it says the same
of one tile of the matrix, of keys and values on their way into pages (`write int8 x 64`) of all rows.

Needs libtpu: the project's extra compilers-tpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import tpu_matmuls, tpu_writes
from benchmarks.bundles import Loop, read_bundles, working_loops
from benchmarks.tpu_matmuls import MatmulShape
from benchmarks.tpu_writes import WriteShape

TPU_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
PAGE_SIZE, NUM_PAGES, SEQUENCES, TABLE_PAGES = 64, 1000, 64, 64
CHUNK_ROWS, CHUNK_SEQUENCES = 1024, 8
PEER_DECODE_PAGES, PEER_PREFILL_PAGES, PEER_PREFILL_ROWS = 16, 8, 128


@dataclass(frozen=True)
class Chip:
    topology: str
    clock: float
    """Cycles a second of a core. The vendor gives peak rates, from which it follows for v5e and v5p; that of
    v6e is taken to be v5p's."""
    bandwidth: float
    """Bytes a second from HBM, for each core."""


CHIPS = {
    "v5e": Chip("v5e:2x2", 1.5e9, 819e9),
    "v5p": Chip("v5p:2x2x1", 1.75e9, 2765e9 / 2),
    "v6e": Chip("v6e:2x2", 1.75e9, 1640e9),
}


@dataclass(frozen=True)
class Shape:
    """What is compiled."""

    name: str
    prefill: bool
    num_kv_heads: int
    queries_per_kv: int
    head_size: int
    kv_format: str = "bfloat16"
    peer: bool = False


SHAPES: dict[str, Shape | MatmulShape | WriteShape] = {
    shape.name: shape
    for shape in (
        *tpu_matmuls.SHAPES,
        *tpu_writes.SHAPES,
        Shape("decode 8:1 h128", False, 1, 8, 128),
        Shape("decode 8:1 h128 peer", False, 1, 8, 128, peer=True),
        Shape("decode 8:1 h128 int8", False, 1, 8, 128, "int8"),
        Shape("decode 8:1 h128 fp8", False, 1, 8, 128, "float8_e4m3fn"),
        Shape("decode 8 x 4:1 h128", False, 8, 4, 128),
        Shape("decode 8 x 1:1 h64", False, 8, 1, 64),
        Shape("decode 4:1 h256", False, 1, 4, 256),
        Shape("prefill 8:1 h128", True, 1, 8, 128),
        Shape("prefill 8:1 h128 peer", True, 1, 8, 128, peer=True),
        Shape("prefill 8 x 4:1 h128", True, 8, 4, 128),
    )
}


@dataclass(frozen=True)
class Measured:
    """One iteration of a kernel's inner loop."""

    chip: str
    shape: str
    compile_seconds: float
    bundles_listed: int
    bundles: int
    page_bytes: int
    """Read from HBM."""
    operations: int
    """Of the matrix units."""
    mxu_share: float
    spills: int
    fills: int

    @property
    def hbm_ratio(self) -> float:
        """Time of the bundles, by the time of the bytes: below 1 the kernel waits for HBM."""
        chip = CHIPS[self.chip]
        return (self.bundles / chip.clock) / (self.page_bytes / chip.bandwidth)


def main() -> None:
    """Read the command line; compile for each chip in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_schedule", description=__doc__)
    parser.add_argument("chips", nargs="*", metavar="chip", help=", ".join(CHIPS))
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        chip, *names = arguments.one
        for measured in measure(chip, names):
            print(json.dumps(dataclasses.asdict(measured)), flush=True)
        return
    for chip in arguments.chips:
        if chip not in CHIPS:
            parser.error(f"unknown chip {chip!r}: choose from {', '.join(CHIPS)}")
    if not arguments.json:
        print("chip  shape                   compile  listed  executed  MXU busy  spills/fills  time")
    names = [name for name in SHAPES if arguments.only in name]
    for chip in arguments.chips or CHIPS:
        for measured in measure_all_apart(chip, names):
            print(json.dumps(dataclasses.asdict(measured)) if arguments.json else table_line(measured))
            sys.stdout.flush()


def table_line(measured: Measured) -> str:
    time_text = (
        f"{measured.operations / measured.bundles / 1e3:.0f}k operations a bundle"
        if SHAPES[measured.shape].prefill
        else f"{measured.hbm_ratio:.2f} of HBM's for {measured.page_bytes >> 10} KiB"
    )
    return (
        f"{measured.chip:5} {measured.shape:23} {measured.compile_seconds:5.1f} s "
        f"{measured.bundles_listed:7} {measured.bundles:9} {measured.mxu_share:9.0%} "
        f"{measured.spills:6}/{measured.fills:<6} {time_text}"
    )


def measure_all_apart(chip: str, shapes: Sequence[str]) -> Iterator[Measured]:
    """One after the other, in a process of its own: the compiler reads its settings once."""
    command = [sys.executable, "-m", "benchmarks.tpu_schedule", "--one", chip, *shapes]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield Measured(**json.loads(line))
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"{', '.join(shapes)} for {chip}: {errors.read()[-2000:]}")


def measure(chip: str, names: Sequence[str]) -> Iterator[Measured]:
    """Compile shapes in this process, which must not have imported jax yet."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_static_gaps=true"
        os.environ.update(TPU_ENVIRONMENT, LIBTPU_INIT_ARGS=flags)
        for name in names:
            for path in Path(folder).iterdir():
                path.unlink()
            yield _measure(chip, SHAPES[name], Path(folder))


def _measure(chip: str, shape: Shape | MatmulShape | WriteShape, folder: Path) -> Measured:
    """Compile one, whose schedule the compiler leaves in a folder."""
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology)
    device = topology.devices[0]
    mesh = jax.sharding.Mesh([device], ("device",))
    donated = range(0)
    with jax.default_device(device), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if isinstance(shape, MatmulShape):
            function, operands = tpu_matmuls.program(shape, device)
            kernel, work = "", (0, 0)
        elif isinstance(shape, WriteShape):
            function, operands = tpu_writes.program(shape)
            kernel, work = "", (0, 0)
            donated = range(len(operands) - 4)
        else:
            kernel, function, operands, work = (_peer if shape.peer else _ours)(shape, device)
        placed = jax.sharding.SingleDeviceSharding(device)
        operands = [jax.ShapeDtypeStruct(*operand, sharding=placed) for operand in operands]
        started = time.monotonic()
        jax.jit(function, donate_argnums=donated).lower(*operands).compile()
        seconds = time.monotonic() - started
    if isinstance(shape, MatmulShape):
        done = tpu_matmuls.work_of(shape, device, folder)
        return _measured(
            chip, shape.name, seconds, done.listed, done.loop, done.bundles, done.tile_bytes, done.operations
        )
    if isinstance(shape, WriteShape):
        written = tpu_writes.work_of(shape, folder)
        return _measured(
            chip, shape.name, seconds, written.listed, written.loop, written.bundles, written.tile_bytes, 0
        )
    bundles = read_bundles(folder, kernel)
    loop = working_loops(bundles)[0]
    return _measured(chip, shape.name, seconds, len(bundles), loop, len(loop), *work)


def _measured(
    chip: str,
    name: str,
    seconds: float,
    listed: int,
    loop: Loop,
    executed: int,
    page_bytes: int,
    operations: int,
) -> Measured:
    return Measured(
        chip,
        name,
        seconds,
        listed,
        executed,
        page_bytes,
        operations,
        loop.mxu_share,
        loop.total("SPILL"),
        loop.total("FILL"),
    )


Program = tuple[str, Callable[..., Any], list[tuple[tuple[int, ...], Any]], tuple[int, int]]
"""A kernel's name in the dumps, a function, its operands' shapes and types, and of one iteration of its inner
loop the bytes from HBM and the operations of the matrix units."""


def _ours(shape: Shape, device: Any) -> Program:
    import jax.numpy as jnp

    from pallas_kernels.dispatch import Target
    from pallas_kernels.page_layout import LANES, PageLayout
    from pallas_kernels.ragged_paged_attention import AttentionParams, tpu

    layout = PageLayout(
        PAGE_SIZE, shape.num_kv_heads, shape.head_size, NUM_PAGES, shape.kv_format, shape.kv_format
    )
    target = Target.of(device)
    num_rows, num_sequences = (CHUNK_ROWS, CHUNK_SEQUENCES) if shape.prefill else (SEQUENCES, SEQUENCES)
    chunk_sizes = tpu.choose_chunk_sizes(num_rows, shape.queries_per_kv, layout, TABLE_PAGES, target)
    tile_rows = -(-shape.queries_per_kv // 8) * 8
    few_sizes = tpu.choose_few_sizes(num_sequences, layout, tile_rows, TABLE_PAGES, target)

    def attend(q: Any, pool: Any, table: Any, starts: Any, lengths: Any, *scales: Any) -> Any:
        return tpu.attend_tpu(
            q,
            pool,
            scales[0] if scales else None,
            table,
            starts,
            lengths,
            NUM_PAGES,
            None,
            layout=layout,
            params=AttentionParams(shape.head_size**-0.5),
            single=not shape.prefill,
            target=target,
            interpret=False,
        )

    operands = [
        ((num_rows, shape.num_kv_heads * shape.queries_per_kv, shape.head_size), jnp.bfloat16),
        (layout.pool_shape(2), jnp.dtype(layout.storage)),
        ((num_sequences, TABLE_PAGES), jnp.int32),
        ((num_sequences + 1,), jnp.int32),
        ((num_sequences,), jnp.int32),
        *([(layout.scales_shape(2), jnp.float32)] if layout.quantised else []),
    ]
    block_tokens = (chunk_sizes if shape.prefill else few_sizes).pages_per_block * PAGE_SIZE
    page_bytes = layout.rows * LANES * jnp.dtype(layout.storage).itemsize
    page_bytes += 4 * layout.scale_rows * LANES if layout.quantised else 0
    block_bytes = page_bytes * block_tokens // PAGE_SIZE
    rows = 2 * chunk_sizes.rows_at_once if shape.prefill else shape.num_kv_heads * shape.queries_per_kv
    work = block_bytes, 4 * rows * block_tokens * shape.head_size
    return "paged_attention_chunks" if shape.prefill else "paged_attention_few", attend, operands, work


def _peer(shape: Shape, _: Any) -> Program:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    num_rows, num_sequences = (CHUNK_ROWS, CHUNK_SEQUENCES) if shape.prefill else (SEQUENCES, SEQUENCES)
    pages = PEER_PREFILL_PAGES if shape.prefill else PEER_DECODE_PAGES
    query_rows = PEER_PREFILL_ROWS if shape.prefill else 8
    num_heads = shape.num_kv_heads * shape.queries_per_kv

    def attend(*operands: Any) -> Any:
        return ragged_paged_attention(
            *operands,
            sm_scale=shape.head_size**-0.5,
            num_kv_pages_per_block=pages,
            num_queries_per_block=query_rows,
            vmem_limit_bytes=64 << 20,
        )

    operands = [
        ((num_rows, num_heads, shape.head_size), jnp.bfloat16),
        ((2 * NUM_PAGES, PAGE_SIZE, 2 * shape.num_kv_heads, shape.head_size), jnp.bfloat16),
        ((num_sequences,), jnp.int32),
        ((num_sequences, TABLE_PAGES), jnp.int32),
        ((num_sequences + 1,), jnp.int32),
        ((1,), jnp.int32),
    ]
    block_tokens = pages * PAGE_SIZE
    rows = query_rows * num_heads if shape.prefill else num_heads
    work = (
        block_tokens * 2 * shape.num_kv_heads * shape.head_size * 2,
        4 * rows * block_tokens * shape.head_size,
    )
    return "ragged_paged_attention", attend, operands, work


if __name__ == "__main__":
    main()
