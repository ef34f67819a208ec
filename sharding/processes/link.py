"""One connection between the leader and a follower: short messages, and a heartbeat both ways.

Arrays never pass here: what is computed with travels in the steps' own collectives. A side that hears nothing
for `SILENCE_LIMIT` seconds, or whose connection breaks, takes the other for lost.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

BEAT_SECONDS = 1.0
SILENCE_LIMIT = 6.0
"""Seconds; with what is left to say good-bye, a job ends within 10 after one of its processes has."""
_PATIENCE = 60.0
"""Seconds for a new follower to say who it is."""
_PAUSED = 1.0
"""Seconds by which a beat is late where this process, not the other, stood still."""
_HEADER = struct.Struct("<BI")
_LONGEST = 2**20


class Kind(enum.IntEnum):
    """Of a message; what its payload holds."""

    BEAT = 0
    HELLO = 1
    """Of a follower: JSON of the job's secret, and its number."""
    READY = 2
    """Of a follower: JSON of what it must have in common with the others."""
    RUN = 3
    """Of the leader: uint32, the number of the program to run next."""
    DIGEST = 4
    """Of a follower: uint32, the checksum of its next result."""
    END = 5
    """Of the leader: all is done."""
    STOP = 6
    """Of either: why the job ends at once."""


OnMessage = Callable[[Kind, bytes], object]
OnLost = Callable[[str], object]


class Link:
    """A connected socket, read by a thread of its own. `send` may be called from any thread."""

    def __init__(self, connection: socket.socket, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take over a socket."""
        connection.settimeout(BEAT_SECONDS)
        with contextlib.suppress(OSError):  # which only TCP has
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._clock = clock
        self._lock = threading.Lock()
        """Held while a message is written."""
        self._received = b""
        self._closed = False

    def start(self, on_message: OnMessage, on_lost: OnLost) -> None:
        """Read from now on.

        Args:
            on_message: called with each message but heartbeats, on the link's thread; it must be quick.
            on_lost: called once, there too, with why the other side is lost; not after `close`.
        """
        threading.Thread(
            target=self._run, args=(on_message, on_lost), name="jaxserve-link", daemon=True
        ).start()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Write a message. Where the other side does not take it any more, the reader finds it lost."""
        with self._lock, contextlib.suppress(OSError):
            try:
                self._socket.sendall(_HEADER.pack(kind, len(payload)) + payload)
            except OSError:  # Half a message may be on its way: nothing can follow it.
                self._socket.shutdown(socket.SHUT_RDWR)

    def read_first(self) -> tuple[Kind, bytes]:
        """The first message of a new connection. Raises OSError if none comes in time."""
        deadline = self._clock() + _PATIENCE
        while self._clock() < deadline:
            for message in self._take():
                return message
        raise TimeoutError("nothing was said")

    def close(self) -> None:
        """End the connection; the other side sees it."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self, on_message: OnMessage, on_lost: OnLost) -> None:
        heard = beat = self._clock()
        while True:
            try:
                messages = list(self._take())
            except (OSError, ValueError) as error:
                if not self._closed:
                    on_lost(str(error))
                return
            now = self._clock()
            # Where this process was stopped itself, the other had no chance to be heard.
            stall = now - beat - BEAT_SECONDS
            heard = now if messages else heard + (stall if stall > _PAUSED else 0.0)
            for kind, payload in messages:
                if kind is not Kind.BEAT:
                    on_message(kind, payload)
            if now - heard > SILENCE_LIMIT:
                on_lost(f"it has said nothing for {now - heard:.0f} s")
                return
            if now - beat >= BEAT_SECONDS / 2:
                self.send(Kind.BEAT)
                beat = now

    def _take(self) -> Iterator[tuple[Kind, bytes]]:
        """The messages that have arrived, after a beat's time at most. Raises OSError where it is over."""
        with contextlib.suppress(TimeoutError):
            data = self._socket.recv(2**16)
            if not data:
                raise ConnectionResetError("its connection has ended")
            self._received += data
        while len(self._received) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._received)
            if size > _LONGEST:
                raise ValueError("it has sent what is no message")
            if len(self._received) < _HEADER.size + size:
                break
            payload = self._received[_HEADER.size : _HEADER.size + size]
            self._received = self._received[_HEADER.size + size :]
            yield Kind(kind), payload
