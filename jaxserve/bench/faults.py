"""Breaks what a server depends on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from jaxserve.bench.scenarios import Fault

_CHECKER = b"jaxserve.structured.checker_process"
_PROC = Path("/proc")


async def break_down(fault: Fault, server_pid: int | None) -> None:
    """Wait for the fault's time, then break what it names. Where this is cancelled, its command is ended.

    Raises ValueError if that cannot be found, or a command fails.
    """
    await asyncio.sleep(fault.at)
    if fault.breaks == "grammar-checker":
        kill_grammar_checkers(server_pid)
    else:
        await _run(fault.command)


def kill_grammar_checkers(server_pid: int | None) -> int:
    """End a server's processes that check grammars, and return how many there were.

    Raises ValueError if the server's process is not known or has none of them.
    """
    if server_pid is None:
        raise ValueError("breaks 'grammar-checker': a server that was not started here needs --server-pid")
    found = list(_checkers(server_pid))
    for pid in found:
        with suppress(ProcessLookupError):  # It has just ended.
            os.kill(pid, signal.SIGKILL)
    if not found:
        raise ValueError(f"breaks 'grammar-checker': process {server_pid} has none that checks grammars")
    return len(found)


def _checkers(server_pid: int) -> Iterator[int]:
    """Children of a process that check grammars, as Linux lists them."""
    for folder in _PROC.glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == server_pid and _CHECKER in (folder / "cmdline").read_bytes():
                yield int(folder.name)
        except (FileNotFoundError, ProcessLookupError):  # It has just ended.
            continue


async def _run(command: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    try:
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status:
        raise ValueError(f"command {' '.join(command)} has ended with status {status}")
