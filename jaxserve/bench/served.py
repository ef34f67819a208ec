"""A server of a benchmark's own: `jaxserve serve` on free ports of the loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_STOP_SECONDS = 30
_NOT_CHOSEN = frozenset({"http", "grpc", "access", "ready"})
"""Lines of its report that are about its doors."""


@dataclass(frozen=True)
class Addresses:
    """Where a server is; None where it is not."""

    url: str | None
    grpc: str | None
    pid: int | None = None
    """Of its process, where that is on this machine and known."""
    chosen: Mapping[str, str] = field(default_factory=dict[str, str])
    """What it says that was chosen for its model: a line for each thing."""


@contextmanager
def served_model(model: str, arguments: Sequence[str] = ()) -> Iterator[Addresses]:
    """Serve a model in a process of its own until the end of the block, which drains it.

    Raises RuntimeError if it does not become ready; what it has to say goes to standard error.
    """
    own = ("--grpc-port", "0", "--http-port", "0", "--request-log", "off")
    command = [sys.executable, "-m", "jaxserve", "serve", model, *own, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said: dict[str, str] = {}
            for line in process.stdout:
                name, _, value = line.strip().partition(" ")
                said[name] = value.strip()
                if name == "ready":
                    break
            else:
                raise RuntimeError(f"the server has ended with status {process.wait()} before it was ready")
            chosen = {name: text for name, text in said.items() if name not in _NOT_CHOSEN}
            yield Addresses(said["http"], said["grpc"], process.pid, chosen)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
