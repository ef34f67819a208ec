"""Jobs of several processes on the loopback, each `python -m tests.sharding.job_member`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAIT = 600
"""Seconds for a job to come to its end; compiling takes most of it on a busy machine."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def place_arguments(port: int, num_processes: int, process_id: int) -> list[str]:
    """As commands take them."""
    return [
        *("--coordinator", f"127.0.0.1:{port}"),
        *("--num-processes", str(num_processes)),
        *("--process-id", str(process_id)),
    ]


def environment() -> dict[str, str]:
    """One CPU device for each process, whatever the tests themselves run with."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def start(module: str, arguments: Sequence[str], **popen: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


@contextmanager
def job(
    module: str, arguments: Sequence[str], num_processes: int, stdin: Any = subprocess.DEVNULL
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same command in each process; whoever is left at the end is killed."""
    port = free_port()
    members = [
        start(module, [*arguments, *place_arguments(port, num_processes, number)], stdin=stdin)
        for number in range(num_processes)
    ]
    try:
        yield members
    finally:
        for member in members:
            member.kill()
            member.communicate()


def run_job(
    module: str, arguments: Sequence[str], num_processes: int, stdin: Any = subprocess.DEVNULL
) -> list[str]:
    """The standard output of each process of a job in which nothing fails; all have the same input."""
    with job(module, arguments, num_processes, stdin) as members:
        told = [member.communicate(timeout=WAIT) for member in members]
        for member, (_, log) in zip(members, told, strict=True):
            assert member.returncode == 0, log
    return [output for output, _ in told]


def answers_of(output: str) -> Any:
    """What a member has printed last."""
    return json.loads(output.splitlines()[-1])
