"""Thousands of calls that are malformed, oversized, truncated or given up, over both doors of one server.

Nobody who behaves may notice, nothing may be left over, no answer may show a traceback, and the log none of
ours.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

pytest.importorskip("starlette", reason="needs the server extra")
pytest.importorskip("smg_grpc_proto", reason="needs the server extra")
pytest.importorskip("httpx", reason="needs an HTTP client")

from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.server.abuse.grpc_attacks import attack_grpc
from tests.server.abuse.http_attacks import attack_http
from tests.server.grpc_harness import streamed_ids
from tests.server.harness import GREEDY, expected
from tests.server.process_harness import Running, running

AT_ONCE = 16
PAUSE = 0.1
"""Seconds between the calls of one who behaves."""
SPARE_DESCRIPTORS = 4
"""That a server may have opened for good meanwhile."""
MOST_CANCELLED = 2
"""Calls of one who behaves; 30 to 300 are answered meanwhile."""
GRPC_LOOP = b"_cygrpc/aio/server.pyx.pxi"
"""What may show in a traceback: grpcio's own loop, which tells of its own breakdowns."""
OUR_FAULT = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}


class Witness:
    """A client that behaves, and looks closely at what it gets."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._vllm = vllm_engine_pb2_grpc.VllmEngineStub(server.channel)
        self.num_answers = 0
        self.num_cancelled = 0

    async def work(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for ask in (self._ask_native, self._ask_vllm, self._ask_http):
                text = f"hello {self.num_answers}"
                try:
                    assert await ask(text) == expected(text, GREEDY)
                except grpc.aio.AioRpcError as error:
                    # A path that is no UTF-8 ends grpcio's loop of the server that it came to, and its core
                    # then cancels what lay in that server's queue: no program can keep it from that.
                    if error.code() != grpc.StatusCode.CANCELLED:
                        raise
                    self.num_cancelled += 1
                    continue
                self.num_answers += 1
                await asyncio.sleep(PAUSE)

    async def _ask_native(self, text: str) -> list[int]:
        params = pb.SamplingParams(temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True)
        call = self._server.stub.Generate(pb.GenerateRequest(text=text, params=params), timeout=20)
        return streamed_ids([response async for response in call], "delta")

    async def _ask_vllm(self, text: str) -> list[int]:
        params = vllm_engine_pb2.SamplingParams(
            temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True
        )
        request = vllm_engine_pb2.GenerateRequest(text=text, stream=True, sampling_params=params)
        call = self._vllm.Generate(request, timeout=20)
        return streamed_ids([response async for response in call], "chunk")

    async def _ask_http(self, text: str) -> list[int]:
        body = {"prompt": text, "temperature": 0, "max_tokens": GREEDY.max_tokens, "ignore_eos": True}
        answer = await self._server.http.post("/v1/completions", json=body | {"return_token_ids": True})
        return answer.raise_for_status().json()["choices"][0]["token_ids"]


async def attack(server: Running, num_calls: int, seed: int) -> Counter[str]:
    """So many wrong calls; how each ended."""
    ends: Counter[str] = Counter()
    host, _, port = server.http.base_url.netloc.decode().rpartition(":")
    sources = [random.Random(f"{seed} {number}") for number in range(AT_ONCE)]

    async def go_on(noise: random.Random) -> None:
        for _ in range(num_calls // AT_ONCE):
            if noise.random() < 0.5:
                ends[f"HTTP {await attack_http(host, int(port), noise)}"] += 1
            else:
                code = await attack_grpc(server.channel, server.address, noise)
                assert code not in OUR_FAULT
                ends[f"gRPC {code and code.name}"] += 1

    await asyncio.gather(*map(go_on, sources))
    return ends


async def wait_until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        await asyncio.sleep(0.05)


def num_descriptors(pid: int) -> int:
    """Files and connections that a process has open; 0 where the system does not tell."""
    folder = Path(f"/proc/{pid}/fd")
    return len(os.listdir(folder)) if folder.is_dir() else 0


async def under_attack(num_calls: int, log: Path) -> Counter[str]:
    """Attack a server that writes its log there, see that nothing is left of it, and end it."""
    with log.open("wb") as file:
        async with running(module="tests.server.abuse.server", log=file) as server:
            process = server.process
            stop, witness = asyncio.Event(), Witness(server)
            working = asyncio.create_task(witness.work(stop))
            await wait_until(lambda: working.done() or witness.num_answers >= 3)
            before = num_descriptors(process.pid)
            ends = await attack(server, num_calls, seed=7)
            stop.set()
            await working
            assert witness.num_answers >= 6
            assert witness.num_cancelled <= MOST_CANCELLED
            await until_idle(server)
            await wait_until(lambda: num_descriptors(process.pid) <= before + SPARE_DESCRIPTORS)
            assert process.returncode is None
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0, log.read_bytes()
    return ends


async def until_idle(server: Running) -> None:
    load = await server.stub.GetLoad(pb.GetLoadRequest())
    while load.running or load.waiting:
        await asyncio.sleep(0.01)
        load = await server.stub.GetLoad(pb.GetLoadRequest())


def check(num_calls: int, log: Path) -> None:
    ends = asyncio.run(under_attack(num_calls, log))
    sources = set(re.findall(rb'^ +File "(.*?)"', log.read_bytes(), re.MULTILINE))
    assert all(source.endswith(GRPC_LOOP) for source in sources), sources
    assert ends.keys() >= {f"HTTP {status}" for status in ("200", "400", "404", "405", "413", "415", "")}
    assert ends.keys() >= {
        f"gRPC {code}" for code in ("OK", "INVALID_ARGUMENT", "CANCELLED", "UNIMPLEMENTED", None)
    }
    assert "HTTP 500" not in ends


def test_two_thousand_wrong_calls_harm_nobody(tmp_path: Path) -> None:
    check(2_000, tmp_path / "log")


@pytest.mark.slow
def test_ten_thousand_wrong_calls_harm_nobody(tmp_path: Path) -> None:
    check(10_000, tmp_path / "log")
