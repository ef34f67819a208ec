"""The leader of a job and its followers, in threads of this process: what they say, and how one is lost."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import ClassVar

import pytest

from sharding.processes import FollowingJob, LeadingJob, ProcessPlace

FACTS = {"jax": "1", "the engine": "a"}
PATIENCE = 10.0
"""Seconds that a job may take to end."""


class Pair:
    """A leader and one follower; `left` gets the number of each that ends, and its status."""

    made: ClassVar[list[Pair]] = []

    def __init__(self, through: Callable[[int], int] = lambda port: port) -> None:
        self.left: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        places = [ProcessPlace("127.0.0.1:1", 2, number) for number in (0, 1)]
        self.leader = LeadingJob(places[0], leave=lambda status: self.left.put((0, status)))
        self.follower = FollowingJob(places[1], leave=lambda status: self.left.put((1, status)))
        arrival = threading.Thread(
            target=self.follower.connect, args=("127.0.0.1", through(self.leader.port), self.leader.secret)
        )
        arrival.start()
        self.leader.accept(PATIENCE)
        arrival.join()
        self.made.append(self)

    def close(self) -> None:
        self.follower.close()
        self.leader.close()

    def make_ready(self) -> None:
        self.follower.ready(FACTS)
        self.leader.wait_ready(FACTS)

    def both_end(self) -> float:
        """Wait for both to end with status 1; return how long that takes."""
        started = time.monotonic()
        assert {self.left.get(timeout=PATIENCE) for _ in range(2)} == {(0, 1), (1, 1)}
        return time.monotonic() - started


@pytest.fixture(autouse=True)
def pairs_are_closed() -> Iterator[None]:
    yield
    while Pair.made:
        Pair.made.pop().close()


def test_a_follower_runs_what_the_leader_names() -> None:
    pair = Pair()
    pair.make_ready()
    for number in (3, 0, 3):
        pair.leader.run(number)
    assert [pair.follower.next_program() for _ in range(3)] == [3, 0, 3]
    for checksum in (7, 2**32 - 1):
        pair.leader.compare(checksum)
        pair.follower.report(checksum)
    pair.leader.end()
    assert pair.follower.next_program() is None
    assert pair.left.empty()
    assert (pair.leader.loss, pair.follower.loss) == (None, None)


def test_who_computes_otherwise_ends_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair()
    pair.make_ready()
    heard: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    pair.leader.when_lost(heard.put)
    for own, told in ((5, 5), (6, 7)):
        pair.leader.compare(own)
        pair.follower.report(told)
    assert pair.both_end() < PATIENCE
    assert "process 1 has computed otherwise than process 0, in step 2" in str(heard.get(timeout=1))
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split(":")[1] for line in lines) == [" process 0 of 2", " process 1 of 2"]


def test_who_has_another_version_is_named() -> None:
    pair = Pair()
    pair.follower.ready(FACTS | {"jax": "2"})
    with pytest.raises(ValueError, match="process 1 has jax '2', and process 0 has '1'"):
        pair.leader.wait_ready(FACTS)
    assert pair.left.get(timeout=PATIENCE) == (1, 1)
    assert "has jax '2'" in str(pair.follower.loss)


def test_a_failure_of_a_follower_ends_the_job() -> None:
    pair = Pair()
    pair.make_ready()
    pair.follower.fail(RuntimeError("out of memory"))
    assert pair.both_end() < PATIENCE
    assert "process 1 has failed: it has failed: out of memory" in str(pair.leader.loss)


def test_a_stranger_is_sent_away() -> None:
    place = ProcessPlace("127.0.0.1:1", 2, 0)
    leader = LeadingJob(place, leave=lambda status: None)
    with closing(socket.create_connection(("127.0.0.1", leader.port))) as stranger:
        stranger.sendall(b"\x01\x02\x00\x00\x00{}")
        with pytest.raises(TimeoutError, match="1 of 1 followers have not come"):
            leader.accept(0.3)
        assert stranger.recv(1) == b""


def test_a_network_that_is_cut_ends_both_sides() -> None:
    with closing(Proxy()) as proxy:
        pair = Pair(proxy.lead_to)
        pair.make_ready()
        proxy.cut.set()
        assert pair.both_end() < PATIENCE
    for job in (pair.leader, pair.follower):
        assert "it has said nothing for" in str(job.loss)


class Proxy:
    """Passes bytes on between two sockets, until it is cut: then nothing comes, and nothing ends."""

    def __init__(self) -> None:
        self.cut = threading.Event()
        self._closed = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))

    def lead_to(self, port: int) -> int:
        threading.Thread(target=self._serve, args=(port,), daemon=True).start()
        return self._server.getsockname()[1]

    def close(self) -> None:
        self._closed.set()
        self._server.close()

    def _serve(self, port: int) -> None:
        inner, _ = self._server.accept()
        outer = socket.create_connection(("127.0.0.1", port))
        for one, other in ((inner, outer), (outer, inner)):
            threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with one:
            while data := one.recv(4096):
                if self.cut.is_set():
                    self._closed.wait()
                    return
                other.sendall(data)
