"""Run by a test in a network namespace of its own: a server of two processes whose network is cut.

    unshare --user --map-root-user --net python -m tests.server.cut_network MODEL MESH

The processes reach each other at 127.0.0.1, clients the server at another address. Once an answer has begun,
the kernel drops whatever is sent to the former: nothing arrives, not even that a connection has ended. Prints
as one JSON object what becomes of the processes and the client.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tests.server.job_harness import MAX_MODEL_LEN, last_words, request, serving, tokens_of
from tests.sharding.jobs import WAIT

CLIENTS = "127.0.0.9"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdout=subprocess.DEVNULL)


def left_here() -> list[str]:
    """The command lines of all other processes of this network."""
    own = os.stat("/proc/self/ns/net").st_ino
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and (process / "ns/net").stat().st_ino == own:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # It has ended meanwhile, or is somebody else's.
            continue
    return found


async def main(folder: Path, mesh: str) -> None:
    ip("link", "set", "lo", "up")
    ip("address", "add", f"{CLIENTS}/32", "dev", "lo")
    async with serving(folder, mesh, CLIENTS) as (members, stub):
        call = aiter(stub.Generate(request(MAX_MODEL_LEN - 10)))
        await anext(call)
        before = left_here()
        ip("route", "replace", "blackhole", "127.0.0.1/32", "table", "local")
        started = time.monotonic()

        async def end(member: Any) -> float:
            await asyncio.to_thread(member.wait, WAIT)
            return time.monotonic() - started

        async def status() -> str:
            try:
                await tokens_of(call)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        client, *seconds = await asyncio.gather(status(), *map(end, members))
        report = {
            "statuses": [member.returncode for member in members],
            "seconds": seconds,
            "client": client,
            "processes": len(before),
            "left": left_here(),
            "last_words": [last_words(member) for member in members],
        }
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
