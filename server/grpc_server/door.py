"""The gRPC server: its options, its port, its services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from server.core import Routes, RouteState
from server.core.ports import check_free
from server.core.tenants import Tenants
from server.core.tls import TlsFiles
from server.grpc_server.calls import CallCount
from server.grpc_server.guard import TokenGuard
from server.grpc_server.malformed import DecodeGuard
from server.grpc_server.native import NativeServicer
from server.grpc_server.vllm import VllmServicer
from server.proto.jaxserve.v1 import engine_pb2, engine_pb2_grpc

NATIVE_SERVICE: str = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
VLLM_SERVICE: str = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name

MAX_MESSAGE_BYTES = 256 * 2**20
KEEPALIVE_SECONDS = 30

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping as often as the server does, with some slack, without being told to go away.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 1000 // 3),
    # A second server on the same port is to fail, and not to share it unnoticed.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, kw_only=True)
class GrpcOptions:
    """Where the door is and who may come in."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    tls: TlsFiles | None = None
    tokens: Mapping[str, str] | None = None
    """The tenant of each bearer token; None asks nobody for one."""


class GrpcDoor:
    """Serves a server's routes over gRPC, in the event loop that starts it.

    Its health is "" for the process, which lives, and for each service whether every route is ready; for
    "jaxserve.v1.Engine/NAME" whether one is.
    """

    def __init__(self, routes: Routes, options: GrpcOptions) -> None:
        self._routes = routes
        self._options = options
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        tenants = Tenants(options.tokens)
        guards: list[grpc.aio.ServerInterceptor] = [CallCount(routes.calls, (NATIVE_SERVICE, VLLM_SERVICE))]
        guards += [DecodeGuard()] if options.tokens is None else [TokenGuard(tenants), DecodeGuard()]
        self._server = grpc.aio.server(interceptors=guards, options=_OPTIONS)
        engine_pb2_grpc.add_EngineServicer_to_server(NativeServicer(routes, tenants), self._server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmServicer(routes, tenants), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (NATIVE_SERVICE, VLLM_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Open the port; return the address.

        Raises ValueError if the port cannot be had or the certificates cannot be used, OSError for a
        certificate file that cannot be read.
        """
        host, port, tls = self._options.host, self._options.port, self._options.tls
        check_free(host, port)
        host = f"[{host}]" if ":" in host else host
        try:
            if tls is None:
                bound = self._server.add_insecure_port(f"{host}:{port}")
            else:
                bound = self._server.add_secure_port(f"{host}:{port}", _credentials(tls))
        except RuntimeError as error:
            raise ValueError(f"cannot listen on {host}:{port}: {error}") from error
        await self._server.start()
        await self._set_health("", True)
        await self.update()
        return f"{host}:{bound}"

    async def update(self) -> None:
        """Tell who asks for health how the routes stand now."""
        for name in (NATIVE_SERVICE, VLLM_SERVICE):
            await self._set_health(name, self._routes.ready)
        for route in self._routes.names:
            ready = self._routes.state(route) is RouteState.READY
            await self._set_health(f"{NATIVE_SERVICE}/{route}", ready)

    async def stop(self, grace: float) -> None:
        """Close the port; calls that are still open after `grace` seconds are cut off."""
        await self._server.stop(grace)

    async def _set_health(self, name: str, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    if tls.client_ca is None:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], tls.client_ca.read_bytes(), require_client_auth=True)
