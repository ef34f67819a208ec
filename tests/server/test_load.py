"""Many streams at once, for long: nothing fails, nothing grows, nothing is left."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the server extra")
pytest.importorskip("smg_grpc_proto", reason="needs the server extra")
pytest.importorskip("httpx", reason="needs an HTTP client")

from benchmarks.serving.doors import OpenDoor, open_http, open_native, open_vllm
from benchmarks.serving.run import run_load
from benchmarks.serving.workload import random_prompts
from tests.server.process_harness import running

NUM_STREAMS = 256
NUM_CONNECTIONS = 64
"""Of HTTP, where there are fewer requests too: its client has more work with them than the server."""
NUM_TOKENS = 6
MIB = 2**20


def resident_bytes(pid: int) -> int:
    """Memory that a process holds; 0 where the system does not tell."""
    path = Path(f"/proc/{pid}/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.is_file() else 0


async def put_load(open_door: OpenDoor, concurrency: int, num_requests: int, seed: int) -> None:
    prompts = random_prompts(
        num_requests, input_len=12, output_len=NUM_TOKENS, spread=0.0, vocab_size=256, seed=seed
    )
    run = await run_load(open_door, prompts, concurrency=concurrency, show_bar=False)
    assert not [outcome.error for outcome in run.outcomes if outcome.error]
    assert {outcome.usage.output_tokens for outcome in run.outcomes} == {NUM_TOKENS}


async def memory_under_load(num_rounds: int, num_requests: int, most_growth: float) -> list[int]:
    """Bytes that the server holds at most in so many rounds, each of so many requests over gRPC and some over
    HTTP. More rounds follow until those bytes have grown by less than `most_growth`, at most four times as
    many; at the end it finds every page and slot free."""
    sizes: list[int] = []
    async with running("doors", module="benchmarks.message_cost.server") as server:
        doors = (
            (functools.partial(open_native, server.address, None, True), NUM_STREAMS, 0.5),
            (functools.partial(open_vllm, server.address, None, True), NUM_STREAMS, 0.5),
            (functools.partial(open_http, str(server.http.base_url), None, True), NUM_CONNECTIONS, 0.1),
        )
        while len(sizes) < 2 or (sizes[-1] - sizes[-2] >= most_growth and len(sizes) < 4):
            largest = 0
            for number in range(num_rounds):
                for door, concurrency, share in doors:
                    await put_load(door, concurrency, round(num_requests * share), seed=number)
                largest = max(largest, resident_bytes(server.process.pid))
            sizes.append(largest)
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert await server.process.wait() == 0
    return sizes


def test_256_streams_at_once() -> None:
    asyncio.run(memory_under_load(1, 2 * NUM_STREAMS, most_growth=math.inf))


@pytest.mark.slow
def test_memory_is_flat_over_twenty_thousand_requests() -> None:
    sizes = asyncio.run(memory_under_load(4, 2300, most_growth=4 * MIB))
    # A heap may take a step, by how what it holds falls; what leaks takes one each time.
    assert sizes[-1] - sizes[-2] < 4 * MIB, [size / MIB for size in sizes]
