"""The gateway `smg` from PyPI, unmodified, before the gRPC door: chat through it, and a client that goes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.fake_model import fake_limits
from tests.fake_sequence import expected_answer
from tests.server.harness import GREEDY, TOKENIZER
from tests.server.process_harness import running

SMG = shutil.which("smg", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "fake", "messages": MESSAGES, "temperature": 0, "ignore_eos": True}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SMG is None, reason="needs the command smg (pip install smg)"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@asynccontextmanager
async def gateway(worker: str) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that has taken up a worker and its tokenizer, and a client of it."""
    assert SMG is not None
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(SMG, "launch", "--worker-urls", f"grpc://{worker}", "--host", "127.0.0.1"),
        *("--port", str(port), "--prometheus-port", str(free_port())),
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            await until_it_answers(client)
            yield client
    finally:
        process.terminate()
        await process.wait()


async def until_it_answers(client: httpx.AsyncClient) -> None:
    """The gateway fetches the tokenizer after its own start, and says 5xx until it has it."""
    limit = time.monotonic() + 40
    while time.monotonic() < limit:
        try:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1})
            if answer.status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    pytest.fail("the gateway did not come up")


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_chat_through_the_gateway_and_a_client_that_goes() -> None:
    async def main() -> None:
        async with running() as served, gateway(served.address) as client:
            stub = served.stub
            prompt = TOKENIZER.apply_chat_template(MESSAGES)
            tokens = expected_answer(fake_limits(), prompt, GREEDY, 0)[0]
            text = TOKENIZER.decode(tokens)
            body = CHAT | {"max_tokens": len(tokens)}
            whole = (await client.post("/v1/chat/completions", json=body)).json()
            assert whole["choices"][0]["message"]["content"].rstrip("\ufffd") == text.rstrip("\ufffd")
            assert whole["usage"]["prompt_tokens"] == len(prompt)
            assert whole["usage"]["completion_tokens"] == len(tokens)
            streamed = await client.post("/v1/chat/completions", json=body | {"stream": True})
            deltas = [event["choices"][0]["delta"].get("content") or "" for event in events(streamed.text)]
            assert len([delta for delta in deltas if delta]) > 3
            assert "".join(deltas).rstrip("\ufffd") == text.rstrip("\ufffd")

            long = CHAT | {"max_tokens": 100, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=long) as stream:
                await anext(stream.aiter_lines())
            began = time.monotonic()
            while (load := await stub.GetLoad(pb.GetLoadRequest())).running:
                await asyncio.sleep(0.02)
            # By itself the answer would have gone on for two seconds.
            assert time.monotonic() - began < 1
            assert load.free_pages == load.pages
            stats = await stub.GetStats(pb.GetStatsRequest())
            # The gateway calls Abort, or cancels its own call: either way the answer was not finished.
            assert stats.finished["abort"] + stats.failed["cancelled"] == 1

    asyncio.run(main())
