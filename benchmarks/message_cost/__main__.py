"""What does a streamed message cost, at each door? `python -m benchmarks.message_cost`

The product's doors, service and host loop over an engine that computes nothing, against bare asyncio servers
that send messages of the same size, in turn within the same run: one of gRPC, and one that writes to plain
connections, which is what HTTP comes to without a protocol. The engine speaks as fast as the bare gRPC server
sends, or several times as fast: doors that lag put more tokens into a message. "At the pace" is the bare gRPC
server again, with the engine's pauses between its messages: what wakes up for each costs more.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.message_cost import clients
from benchmarks.message_cost.clients import Client, Streams
from benchmarks.message_cost.server import MAX_SLOTS, MAX_TOKENS

BARE, PACED, PLAIN = "bare gRPC", "at the pace", "bare TCP"


class Server:
    """A process of `benchmarks.message_cost.server`."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, "-m", "benchmarks.message_cost.server", kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addresses = self._read().split()

    def cpu_seconds(self, step_seconds: float) -> float:
        """Processor time that it has used; from now on a step takes so long."""
        assert self._process.stdin is not None
        print(step_seconds, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server has ended with status {self._process.wait()}")
        return line


@dataclass(frozen=True)
class Figures:
    """One contender in one round."""

    tokens_per_second: float
    messages_per_second: float
    cpu_us_per_message: float
    """Processor time of the whole server process, its host loop included."""
    bytes_per_message: float

    @property
    def tokens_per_message(self) -> float:
        return self.tokens_per_second / self.messages_per_second


def measure(server: Server, client: Client, streams: Streams, step_seconds: float) -> Figures:
    before = server.cpu_seconds(step_seconds)
    counted = asyncio.run(client(streams))  # pyright: ignore[reportArgumentType]
    cpu_seconds = server.cpu_seconds(step_seconds) - before
    return Figures(
        tokens_per_second=counted.num_tokens / counted.seconds,
        messages_per_second=counted.num_messages / counted.seconds,
        cpu_us_per_message=cpu_seconds / counted.num_messages * 1e6,
        bytes_per_message=counted.num_bytes / counted.num_messages,
    )


@contextmanager
def running(kind: str) -> Iterator[Server]:
    server = Server(kind)
    try:
        yield server
    finally:
        server.close()


def compare(
    bare: Server, doors: Server, streams: Streams, offered: float, num_rounds: int
) -> dict[str, list[Figures]]:
    """Each contender once in every round; the engine speaks `offered` times as fast as bare gRPC."""
    grpc_address, url = doors.addresses
    contenders: dict[str, Client] = {
        "native gRPC": functools.partial(clients.count_native, grpc_address),
        "VllmEngine": functools.partial(clients.count_vllm, grpc_address),
        "HTTP chat": functools.partial(clients.count_http, url),
    }
    trial = Streams(streams.num_streams, 50)
    sizes = {
        name: measure(doors, client, trial, 0.02).bytes_per_message for name, client in contenders.items()
    }
    count_bare = functools.partial(clients.count_bare, bare.addresses[0], round(sizes["native gRPC"]))
    count_flat_out = functools.partial(count_bare, 0.0)
    count_plain = functools.partial(clients.count_plain, bare.addresses[1], round(sizes["HTTP chat"]))
    found: dict[str, list[Figures]] = {name: [] for name in (BARE, PACED, PLAIN, *contenders)}
    for _ in range(num_rounds):
        reference = measure(bare, count_flat_out, streams, 0.0)
        found[BARE].append(reference)
        step_seconds = streams.num_streams / (offered * reference.messages_per_second)
        count_paced = functools.partial(count_bare, step_seconds)
        found[PACED].append(measure(bare, count_paced, streams, 0.0))
        found[PLAIN].append(measure(bare, count_plain, streams, 0.0))
        for name, client in contenders.items():
            found[name].append(measure(doors, client, streams, step_seconds))
    return found


def best(rounds: list[Figures]) -> Figures:
    """Of a machine that others use too: the round in which the contender got furthest."""
    return max(rounds, key=lambda figures: figures.tokens_per_second)


def print_table(found: dict[str, list[Figures]], offered: float) -> None:
    reference = best(found[BARE])
    print(f"\noffered: {offered:g} times what the bare server sends")
    heads = ("tokens/s", "messages/s", "bare/ours", "tokens/message", "CPU us/message", "bytes/message")
    print(f"{'':<13}" + "".join(f"{head:>16}" for head in heads))
    for name, rounds in found.items():
        one = best(rounds)
        ratio = reference.tokens_per_second / one.tokens_per_second
        cells = (
            f"{one.tokens_per_second:.0f}",
            f"{one.messages_per_second:.0f}",
            f"{ratio:.2f}",
            f"{one.tokens_per_message:.2f}",
            f"{min(each.cpu_us_per_message for each in rounds):.1f}",
            f"{one.bytes_per_message:.0f}",
        )
        print(f"{name:<13}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="open at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="in each stream (default %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of which the best counts (default %(default)s)"
    )
    parser.add_argument(
        "--offered",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[1.0, 4.0],
        help="how fast the engine speaks, in multiples of the bare server's rate (default 1,4)",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if not 0 < args.streams <= MAX_SLOTS:
        parser.error(f"--streams {args.streams} is out of range: from 1 to {MAX_SLOTS}")
    if not 0 < args.tokens <= MAX_TOKENS:
        parser.error(f"--tokens {args.tokens} is out of range: from 1 to {MAX_TOKENS}")
    streams = Streams(args.streams, args.tokens)
    machine = describe()
    print(f"{machine}\n{args.streams} streams of {args.tokens} tokens, best of {args.rounds}")
    figures: dict[str, object] = {"machine": machine}
    with running("bare") as bare, running("doors") as doors:
        for offered in args.offered:
            found = compare(bare, doors, streams, offered, args.rounds)
            print_table(found, offered)
            figures[f"offered {offered:g}"] = {
                name: [asdict(one) for one in rounds] for name, rounds in found.items()
            }
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
