"""Bytes to a port, and whatever comes back: for what no well-behaved client would send."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass

PATIENCE = 20.0
"""Seconds that a server may take over an answer; more is a stream that hangs."""
_SHORT_WAIT = 0.03


@dataclass(frozen=True)
class Attack:
    """What goes over one connection."""

    data: bytes
    complete: bool
    """Whether the server has all that it needs for an answer, after which it closes the connection."""
    half_close: bool = False
    """Say that nothing follows, and go on reading."""
    leave_after: int | None = None
    """Hang up when so many bytes of the answer have come."""


async def exchange(host: str, port: int, attack: Attack, noise: random.Random) -> bytes:
    """What the server says before either side hangs up. Raises TimeoutError if it owes an answer and has
    none, or does not come to its end."""
    reader, writer = await asyncio.open_connection(host, port)
    received = bytearray()
    try:
        with suppress(OSError):  # The server may have had enough before it has read all.
            for part in _parts(attack.data, noise):
                writer.write(part)
                await writer.drain()
            if attack.half_close:
                writer.write_eof()
        patience = PATIENCE if attack.complete else _SHORT_WAIT
        try:
            async with asyncio.timeout(patience):
                while attack.leave_after is None or len(received) < attack.leave_after:
                    data = await reader.read(65536)
                    if not data:
                        break
                    received += data
        except TimeoutError:
            if attack.complete:
                raise
        except OSError:
            pass
    finally:
        writer.transport.abort()
    return bytes(received)


def _parts(data: bytes, noise: random.Random) -> list[bytes]:
    """The bytes in up to three packets."""
    if noise.random() < 0.7 or len(data) < 3:
        return [data]
    first, second = sorted(noise.sample(range(len(data)), 2))
    return [data[:first], data[first:second], data[second:]]
