"""A serving process whose engine computes nothing: `python -m benchmarks.message_cost.server bare|doors`.

Prints its addresses. Each line on standard input is the time of a step from now on, in seconds; it answers
with the processor time that the process has used, in seconds. Ends with its input, in an error if a page or a
slot is not free then.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import grpc.aio
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.host_loop import TimedEngine
from jaxserve.async_engine import Engine
from jaxserve.loop import HostLoop
from jaxserve.opened_model import make_loop
from jaxserve.plan import StepHandle, StepResult
from jaxserve.text import Tokenizer
from server.core import ModelIdentity, Routes, Service
from server.grpc_server import GrpcDoor, GrpcOptions
from server.http_door import HttpDoor

BARE_METHOD = "/bare.Bare/Stream"
MAX_SLOTS = 256
MAX_TOKENS = 4000
"""Of an answer."""
_VOCAB_SIZE = 1000
_WORD = 500
"""The token of which every answer consists."""
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class SpeakingEngine(TimedEngine):
    """Says the same word all the time."""

    def collect(self, handle: StepHandle) -> StepResult:
        result = super().collect(handle)
        return replace(result, tokens=result.tokens + _WORD)


def word_tokenizer() -> Tokenizer:
    """Single bytes, as prompts are read, and a thousand words, as answers are spoken."""
    pieces = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"Ġword{number}" for number in range(len(pieces), _VOCAB_SIZE)]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, eos_token_ids=[], chat_templates={"default": _TEMPLATE})


def make_service(engine: SpeakingEngine) -> tuple[Service, HostLoop]:
    """The product's own service over an engine, and its loop to look at.

    Nobody is turned away and no prefix is kept: what a message costs shall not hang on how busy the machine
    is, nor memory on what was asked before.
    """
    tokenizer = word_tokenizer()
    loop = make_loop(engine, tokenizer)
    identity = ModelIdentity(
        name="word",
        model="word",
        path="word",
        family="none",
        fingerprint="0" * 32,
        tokenizer_fingerprint="0" * 32,
        precision="none",
        kv_format="none",
        device="none",
    )
    return Service(identity, tokenizer, Engine(loop)), loop


async def speak(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    """So many messages of so many bytes, one each so many seconds, as the request says: what no gRPC server
    could do faster."""
    num_messages, size, step_seconds = request.split()
    message = b"x" * int(size)
    due = time.monotonic()
    for _ in range(int(num_messages)):
        due += float(step_seconds)
        if due > time.monotonic():
            await asyncio.sleep(due - time.monotonic())
        yield message


async def speak_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The same over a connection that has nothing else on it, one system call for each message."""
    num_messages, size = map(int, (await reader.readline()).split())
    message = b"x" * (size - 1) + b"\n"
    for _ in range(num_messages):
        writer.write(message)
        await asyncio.sleep(0)
        await writer.drain()
    writer.close()


async def serve_bare() -> None:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    service, method = BARE_METHOD.removeprefix("/").split("/")
    handlers = {method: grpc.unary_stream_rpc_method_handler(speak)}  # pyright: ignore[reportArgumentType]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    plain = await asyncio.start_server(speak_plainly, "127.0.0.1", 0)
    addresses = [f"127.0.0.1:{port}", f"http://127.0.0.1:{plain.sockets[0].getsockname()[1]}"]
    await answer(addresses, lambda seconds: None)
    await server.stop(None)
    plain.close()


async def serve_doors() -> None:
    engine = SpeakingEngine(MAX_SLOTS)
    service, loop = make_service(engine)
    routes = Routes.of(service)
    doors = [GrpcDoor(routes, GrpcOptions()), HttpDoor(routes)]
    await answer(
        [await door.start() for door in doors], lambda seconds: setattr(engine, "step_seconds", seconds)
    )
    for door in doors:
        await door.stop(0)
    service.engine.close()
    loop.check_integrity()


async def answer(addresses: list[str], set_pace: Callable[[float], None]) -> None:
    """Tell the addresses, then answer every line, until there is none."""
    print(*addresses, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        set_pace(float(line))
        print(time.process_time(), flush=True)


if __name__ == "__main__":
    asyncio.run(serve_bare() if sys.argv[1] == "bare" else serve_doors())
