"""While models load: the doors are open, live and honest, and a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from server.grpc_server.door import NATIVE_SERVICE, VLLM_SERVICE
from server.grpc_server.status import RETRY_METADATA
from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.server.grpc_harness import failure
from tests.server.process_harness import ROOT, Running, running

MODULE = "tests.server.loading_server"
ASK = pb.GenerateRequest(text="x", params=pb.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
COMPLETION = {"model": "chat", "prompt": "x", "max_tokens": 3}


async def health(served: Running, *names: str) -> list[str]:
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        found = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
    return [health_pb2.HealthCheckResponse.ServingStatus.Name(one.status) for one in found]


def tell(served: Running, word: bytes) -> None:
    assert served.process.stdin is not None
    served.process.stdin.write(word)


async def ended(served: Running) -> int:
    began = time.monotonic()
    status = await served.process.wait()
    assert time.monotonic() - began < 10
    return status


def test_what_is_asked_while_models_load() -> None:
    async def main() -> None:
        async with running("chat", "small", module=MODULE) as served:
            http, names = served.http, ("", NATIVE_SERVICE, VLLM_SERVICE, f"{NATIVE_SERVICE}/chat")
            assert await health(served, *names) == ["SERVING", "NOT_SERVING", "NOT_SERVING", "NOT_SERVING"]
            error = await failure(served.stub.Generate(ASK))
            assert (error.code(), error.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "model 'chat' is loading",
            )
            assert int(dict(error.trailing_metadata() or ())[RETRY_METADATA]) > 0
            info = await failure(served.stub.GetModelInfo(pb.GetModelInfoRequest(model="small")))
            assert info.details() == "model 'small' is loading"
            for path in ("/ready", "/ready/chat", "/v1/models"):
                answer = await http.get(path)
                assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (503, True)
            answer = await http.post("/v1/completions", json=COMPLETION)
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
            assert "is loading" in answer.json()["error"]["message"]
            for path in ("/health", "/metrics", "/"):
                assert (await http.get(path)).status_code == 200
            assert (await http.get("/")).json()["models"] == {"chat": "loading", "small": "loading"}
            async with grpc.aio.insecure_channel(served.address) as channel:
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
                (listed,) = [one async for one in stub.ServerReflectionInfo(iter(asked))]
                assert len(listed.list_services_response.service) >= 4

            tell(served, b".")
            while (await http.get("/ready/chat")).status_code != 200:
                await asyncio.sleep(0.01)
            assert (await http.get("/ready")).status_code == 503
            assert [r async for r in served.stub.Generate(ASK)][-1].final.receipt.route == "chat"
            assert await health(served, *names) == ["SERVING", "NOT_SERVING", "NOT_SERVING", "SERVING"]
            models = (await served.stub.ListModels(pb.ListModelsRequest())).models
            assert [(one.name, one.state) for one in models] == [("chat", "ready"), ("small", "loading")]
            assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["chat"]

            tell(served, b".")
            assert served.process.stdout is not None
            assert (await served.process.stdout.readline()) == b"ready\n"
            assert set(await health(served, *names)) == {"SERVING"}
            answer = await http.get("/ready")
            assert (answer.status_code, answer.json()["models"]) == (
                200,
                {"chat": "ready", "small": "ready"},
            )
            assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["chat", "small"]
            assert (await http.get("/ready/gpt-4")).status_code == 404
            served.process.send_signal(signal.SIGTERM)
            assert await ended(served) == 0

    asyncio.run(main())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_models_load_ends_it_at_once(number: signal.Signals, status: int) -> None:
    async def main() -> None:
        async with running("chat", module=MODULE) as served:
            served.process.send_signal(number)
            assert await ended(served) == status
            assert served.process.stderr is not None
            assert await served.process.stderr.read() == b""

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_ends_it() -> None:
    async def main() -> None:
        async with running("chat", module=MODULE) as served:
            tell(served, b"x")
            assert await ended(served) == 1  # The command line makes it a sentence and a 2.
            assert served.process.stderr is not None
            assert b"ValueError: chat names no model" in await served.process.stderr.read()

    asyncio.run(main())


@pytest.mark.parametrize("door", ["--grpc-port", "--http-port"])
def test_a_taken_port_is_one_sentence_before_any_model_is_looked_for(door: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--grpc-port": "0", "--http-port": "0"} | {door: str(port)}
        result = subprocess.run(
            [sys.executable, "-m", "jaxserve", "serve", "/no/such/model"]
            + [word for pair in ports.items() for word in pair],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    expected = f"jaxserve serve: error: cannot listen on 127.0.0.1:{port}: the port is in use; choose another"
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(expected)
    assert result.stderr.count("\n") == 1
