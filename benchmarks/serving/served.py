"""A server of the benchmark's own: `jaxserve serve` on free ports of the loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_STOP_SECONDS = 30


@dataclass(frozen=True)
class Addresses:
    """Where a server is; None where it is not."""

    url: str | None
    grpc: str | None


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
            yield Addresses(said["http"], said["grpc"])
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
