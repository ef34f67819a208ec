"""What holds for every gRPC service: health, reflection, certificates, tokens, the port."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from jaxserve.bearer_tokens import read_tokens
from server.core import Routes, ServiceError
from server.core.tenants import Tenants
from server.core.tls import TlsFiles
from server.grpc_server import GrpcDoor, GrpcOptions
from server.grpc_server.door import NATIVE_SERVICE, VLLM_SERVICE
from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc
from tests.fake_model import fake_limits
from tests.server.grpc_harness import Served, failure, grpc_serving
from tests.server.harness import ENDLESS, GREEDY, SlowEngine, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = pb.GenerateRequest(
    text="x", params=pb.SamplingParams(temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True)
)
LONG = pb.GenerateRequest(
    text="x", params=pb.SamplingParams(temperature=0.0, max_tokens=ENDLESS.max_tokens, ignore_eos=True)
)


async def health(served: Served, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(served.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


def test_the_services_have_their_published_names() -> None:
    assert (NATIVE_SERVICE, VLLM_SERVICE) == ("jaxserve.v1.Engine", "vllm.grpc.engine.VllmEngine")


def test_a_server_that_drains_is_alive_and_not_ready() -> None:
    async def main() -> None:
        async with grpc_serving(SlowEngine(fake_limits())) as served:
            assert [await health(served, name) for name in ("", NATIVE_SERVICE, VLLM_SERVICE)] == [
                SERVING
            ] * 3
            call = served.native.Generate(LONG)
            await call.read()
            served.service.start_draining()
            await served.door.update()
            drain = asyncio.create_task(served.service.drain(10.0))
            await asyncio.sleep(0)
            assert await health(served, "") == SERVING
            assert await health(served, NATIVE_SERVICE) == NOT_SERVING
            assert await health(served, VLLM_SERVICE) == NOT_SERVING
            assert (await failure(served.native.Generate(REQUEST))).code() is grpc.StatusCode.UNAVAILABLE
            while (response := await call.read()) is not grpc.aio.EOF:
                last = response
            assert last.final.usage.completion_tokens == 100
            assert await drain

    asyncio.run(main())


def test_reflection_lists_the_services_and_describes_them() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=NATIVE_SERVICE),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=VLLM_SERVICE),
            ]
            listed, *described = [r async for r in stub.ServerReflectionInfo(iter(asked))]
            names = {service.name for service in listed.list_services_response.service}
            assert {NATIVE_SERVICE, VLLM_SERVICE, "grpc.health.v1.Health"} <= names
            assert all(r.file_descriptor_response.file_descriptor_proto for r in described)

    asyncio.run(main())


def test_tokens_are_tenants() -> None:
    def bearer(token: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {token}"),)

    async def main() -> None:
        async with grpc_serving(
            SlowEngine(fake_limits()), tokens={"secret-a": "a", "secret-b": "b"}
        ) as served:
            native = served.native
            for metadata in (None, bearer("wrong"), (("authorization", "Basic secret-a"),)):
                for call in (
                    native.Generate(REQUEST, metadata=metadata),
                    native.GetLoad(pb.GetLoadRequest(), metadata=metadata),
                    served.vllm.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), metadata=metadata),
                ):
                    assert (await failure(call)).code() is grpc.StatusCode.UNAUTHENTICATED
            assert await health(served, "") == SERVING
            call = native.Generate(
                pb.GenerateRequest(request_id="r", **_fields(LONG)), metadata=bearer("secret-a")
            )
            await call.read()
            abort = pb.AbortRequest(request_ids=["r"])
            assert (await native.Abort(abort, metadata=bearer("secret-b"))).aborted == []
            claim = pb.AbortRequest(request_ids=["r"], tenant="a")
            error = await failure(native.Abort(claim, metadata=bearer("secret-b")))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await native.Abort(abort, metadata=bearer("secret-a"))).aborted == ["r"]
            call.cancel()

    asyncio.run(main())


def _fields(message: pb.GenerateRequest) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


def test_the_token_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# who may come in\n\nalice  s3cret\nbob other\nalice second\n")
    tokens = read_tokens(path)
    assert tokens == {"s3cret": "alice", "other": "bob", "second": "alice"}
    assert Tenants(tokens).authenticate("bearer s3cret") == "alice"
    for text, words in (
        ("alice\n", ":1: expected"),
        ("a b c\n", ":1: expected"),
        ("a:b c\n", "colon"),
        ("a x\n\nb x\n", ":3: .* earlier"),
        ("# nobody\n", "names no token"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_tokens(path)
    with pytest.raises(ServiceError, match="not known"):
        Tenants(tokens).authenticate("Bearer nope")
    assert Tenants(None).tenant("", "anybody") == "anybody"


def test_trace_context_reaches_the_record() -> None:
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    traces: list[tuple[str, str]] = []

    async def main() -> None:
        async with grpc_serving() as served:
            served.service.observers.append(
                lambda record: traces.append((record.request.trace_parent, record.request.trace_state))
            )
            for value in (good, "nonsense"):
                metadata = (("traceparent", value), ("tracestate", "vendor=1"))
                assert [r async for r in served.native.Generate(REQUEST, metadata=metadata)]

    asyncio.run(main())
    assert traces == [(good, "vendor=1"), ("", "")]


def make_certificate(folder: Path, name: str) -> TlsFiles:
    """A self-signed pair for localhost."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    files = TlsFiles(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    output = ["-keyout", str(files.key), "-out", str(files.certificate)]
    subprocess.run([*command.split(), *subject, *output], check=True, capture_output=True)
    return files


@pytest.mark.parametrize("client", ["plain", "stranger", "known"])
def test_certificates_of_the_server_and_of_clients(tmp_path: Path, client: str) -> None:
    server, known, stranger = (make_certificate(tmp_path, name) for name in ("server", "known", "stranger"))
    root = server.certificate.read_bytes()
    shown = {"plain": None, "stranger": stranger, "known": known}[client]
    credentials = grpc.ssl_channel_credentials(
        root, *([] if shown is None else [shown.key.read_bytes(), shown.certificate.read_bytes()])
    )

    async def main(tls: TlsFiles, *, enters: bool) -> None:
        async with grpc_serving(tls=tls, channel_credentials=credentials) as served:
            if enters:
                assert await health(served, NATIVE_SERVICE) == SERVING
            else:
                error = await failure(served.native.GetLoad(pb.GetLoadRequest()))
                assert error.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main(server, enters=True))
    mutual = TlsFiles(certificate=server.certificate, key=server.key, client_ca=known.certificate)
    asyncio.run(main(mutual, enters=client == "known"))


def test_a_port_that_is_taken_is_an_error_in_words() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            port = int(served.address.rpartition(":")[2])
            second = GrpcDoor(Routes.of(served.service), GrpcOptions(port=port))
            with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
                await second.start()
            await second.stop(0)

    asyncio.run(main())


def test_messages_of_many_megabytes_reach_the_service() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            for huge in (
                served.native.Tokenize(pb.TokenizeRequest(text="x" * (20 * 2**20))),
                served.native.Detokenize(pb.DetokenizeRequest(token_ids=[100] * (6 * 2**20))),
            ):
                error = await failure(huge)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "the limit is" in (error.details() or "")

    asyncio.run(main())


def test_stopping_cuts_off_what_is_open() -> None:
    async def main() -> None:
        async with serving() as (service, _):
            door = GrpcDoor(Routes.of(service), GrpcOptions())
            address = await door.start()
            async with grpc.aio.insecure_channel(address) as channel:
                call = engine_pb2_grpc.EngineStub(channel).Generate(LONG)
                while not service.engine.num_open:
                    await asyncio.sleep(0.001)
                await door.stop(0)
                await failure(call)
                while service.engine.num_open:
                    await asyncio.sleep(0.001)

    asyncio.run(main())
