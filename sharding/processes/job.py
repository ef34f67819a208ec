"""The processes of one job: one leads, the others follow, and all end when one is lost.

JAX's own runtime connects them and carries every array. Beside it each follower has a link to the leader, on
which it hears which program to run next and says what came of it: see `sharding.processes.link`.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

from sharding.processes.link import SILENCE_LIMIT, Kind, Link
from sharding.processes.place import ProcessPlace

LEAVING_SECONDS = 2.5
"""For whoever asked to hear of a loss to tell its own clients, before the process ends."""
FAILED = 1
"""Exit status of every process of a job that has lost one."""
_NUMBER = struct.Struct("<I")
_CONNECTING_SECONDS = 60.0
_VERDICT_SECONDS = SILENCE_LIMIT + 1.0

Facts = Mapping[str, str]
"""What all processes must have in common, by name."""


class JobLostError(RuntimeError):
    """A process of the job is dead, silent, or computes otherwise than the others."""


class Job(ABC):
    """What leader and followers have in common. May be used from any thread."""

    def __init__(self, place: ProcessPlace, *, leave: Callable[[int], object] = os._exit) -> None:
        """Take a place.

        Args:
            place: of this process.
            leave: ends the process with a status, over threads that wait for a device.
        """
        self.place = place
        self._leave = leave
        self._lock = threading.Lock()
        self._listeners: list[Callable[[JobLostError], object]] = []
        self._lost = threading.Event()
        self._loss: JobLostError | None = None
        self._ended = False

    @property
    def leads(self) -> bool:
        return self.place.process_id == 0

    @property
    def loss(self) -> JobLostError | None:
        """Why the job ends, if it does so before its time."""
        return self._loss

    def when_lost(self, listener: Callable[[JobLostError], object]) -> None:
        """Have a function called when a process is lost, on any thread, shortly before this one ends."""
        self._listeners.append(listener)

    def verdict(self, error: Exception) -> Exception:
        """Why a device call failed: the loss of a process, if it turns out to be that, or the error itself.

        Waits for as long as it may take to find out.
        """
        self._lost.wait(_VERDICT_SECONDS)
        return self._loss or error

    def _lose(self, reason: str) -> None:
        """End the job, once. Does not return before the process is to end."""
        with self._lock:
            if self._ended or self._loss is not None:
                return
            self._loss = JobLostError(reason)
        self._tell(reason)
        place = self.place
        print(
            f"jaxserve: process {place.process_id} of {place.num_processes}: {reason}; the job ends",
            file=sys.stderr,
            flush=True,
        )
        self._lost.set()
        for listener in self._listeners:
            listener(self._loss)
        if self._listeners:
            time.sleep(LEAVING_SECONDS)
        self._leave(FAILED)

    def close(self) -> None:
        """Take no part any more; processes that go on see a lost one."""
        with self._lock:
            self._ended = True
        for link in self._links():
            link.close()

    def _tell(self, reason: str) -> None:
        """Let the other processes know."""
        for link in self._links():
            link.send(Kind.STOP, reason.encode())

    @abstractmethod
    def _links(self) -> list[Link]:
        """To the other processes."""


class _Follower:
    """One as the leader sees it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.facts: Facts | None = None
        self.own: deque[int] = deque()
        """Checksums of the leader's results that it has not told its own of."""
        self.told: deque[int] = deque()
        self.num_compared = 0


class LeadingJob(Job):
    """The job as process 0 has it."""

    def __init__(self, place: ProcessPlace, *, leave: Callable[[int], object] = os._exit) -> None:
        super().__init__(place, leave=leave)
        self.secret = secrets.token_hex(16)
        """What followers show to be let in."""
        self._listener = socket.create_server(("", 0))
        self._followers: dict[int, _Follower] = {}
        self._readiness = threading.Condition(self._lock)

    @property
    def port(self) -> int:
        """Where followers find it."""
        return self._listener.getsockname()[1]

    def accept(self, seconds: float) -> None:
        """Wait for all followers. Raises TimeoutError, saying how many are missing."""
        deadline = time.monotonic() + seconds
        wanted = self.place.num_processes - 1
        with self._listener:
            while len(self._followers) < wanted:
                self._listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    missing = wanted - len(self._followers)
                    reason = f"{missing} of {wanted} followers have not come in {seconds:.0f} s"
                    raise TimeoutError(reason) from None
                self._admit(Link(connection))
        for number, follower in self._followers.items():
            self._listen(number, follower)

    def wait_ready(self, facts: Facts) -> None:
        """Wait until every follower is ready.

        Raises ValueError, naming process and fact, where one differs in what it must have in common; the job
        ends then.
        """
        with self._readiness:
            while self._loss is None and any(f.facts is None for f in self._followers.values()):
                self._readiness.wait(1.0)
            told = {number: follower.facts or {} for number, follower in self._followers.items()}
        if self._loss is not None:
            raise self._loss
        for number, theirs in told.items():
            differing = [name for name in facts if theirs.get(name) != facts[name]]
            if differing:
                name = differing[0]
                reason = (
                    f"process {number} has {name} {theirs.get(name)!r}, and process 0 has {facts[name]!r}"
                )
                self._tell(reason)
                self._ended = True
                raise ValueError(reason)

    def run(self, number: int) -> None:
        """Have every follower run a program next."""
        for follower in self._followers.values():
            follower.link.send(Kind.RUN, _NUMBER.pack(number))

    def compare(self, checksum: int) -> None:
        """Hold the followers' next result to this one; called for each result, in order."""
        for number, follower in self._followers.items():
            with self._lock:
                follower.own.append(checksum)
            self._compare(number, follower)

    def end(self) -> None:
        """Let the followers end. Nothing is lost any more."""
        with self._lock:
            if self._ended or self._loss is not None:
                return
            self._ended = True
        for follower in self._followers.values():
            follower.link.send(Kind.END)

    def _admit(self, link: Link) -> None:
        """Take in who knows the secret; others are sent away."""
        try:
            kind, payload = link.read_first()
            said = json.loads(payload) if kind is Kind.HELLO else {}
            number = said["process"]
            known = hmac.compare_digest(said["secret"], self.secret)
        except (OSError, ValueError, KeyError, TypeError):
            link.close()
            return
        if not known or number in self._followers:
            link.close()
            return
        self._followers[number] = _Follower(link)

    def _listen(self, number: int, follower: _Follower) -> None:
        follower.link.start(
            lambda kind, payload: self._hear(number, follower, kind, payload),
            lambda reason: self._lose(f"process {number} is lost: {reason}"),
        )

    def _hear(self, number: int, follower: _Follower, kind: Kind, payload: bytes) -> None:
        if kind is Kind.READY:
            with self._readiness:
                follower.facts = json.loads(payload)
                self._readiness.notify_all()
        elif kind is Kind.DIGEST:
            with self._lock:
                follower.told.append(_NUMBER.unpack(payload)[0])
            self._compare(number, follower)
        elif kind is Kind.STOP:
            self._lose(f"process {number} has failed: {payload.decode()}")

    def _compare(self, number: int, follower: _Follower) -> None:
        with self._lock:
            alike = True
            while alike and follower.own and follower.told:
                alike = follower.own.popleft() == follower.told.popleft()
                follower.num_compared += 1
        if not alike:
            self._lose(
                f"process {number} has computed otherwise than process 0, in step {follower.num_compared}"
            )

    def _links(self) -> list[Link]:
        return [follower.link for follower in self._followers.values()]


class FollowingJob(Job):
    """The job as every other process has it."""

    def __init__(self, place: ProcessPlace, *, leave: Callable[[int], object] = os._exit) -> None:
        super().__init__(place, leave=leave)
        self._link: Link | None = None
        self._programs: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def connect(self, host: str, port: int, secret: str) -> None:
        """Come to the leader. Raises OSError if it cannot be reached."""
        self._link = Link(socket.create_connection((host, port), timeout=_CONNECTING_SECONDS))
        hello = {"process": self.place.process_id, "secret": secret}
        self._link.send(Kind.HELLO, json.dumps(hello).encode())
        self._link.start(self._hear, lambda reason: self._lose(f"process 0, which leads, is lost: {reason}"))

    def ready(self, facts: Facts) -> None:
        """Tell the leader that programs can be run."""
        self._send(Kind.READY, json.dumps(dict(facts)).encode())

    def next_program(self) -> int | None:
        """The number of the program to run next, as soon as it is known; None at the end."""
        return self._programs.get()

    def report(self, checksum: int) -> None:
        """Tell the leader the checksum of the next result."""
        self._send(Kind.DIGEST, _NUMBER.pack(checksum))

    def fail(self, error: Exception) -> None:
        """Tell the leader why this process cannot go on, unless it is lost itself, and end."""
        if self.verdict(error) is error:
            self._lose(f"it has failed: {error}")

    def _send(self, kind: Kind, payload: bytes) -> None:
        assert self._link is not None, "it is connected"
        self._link.send(kind, payload)

    def _hear(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.RUN:
            self._programs.put(_NUMBER.unpack(payload)[0])
        elif kind is Kind.END:
            with self._lock:
                self._ended = True
            self._programs.put(None)
        elif kind is Kind.STOP:
            self._lose(payload.decode())

    def _links(self) -> list[Link]:
        return [] if self._link is None else [self._link]
