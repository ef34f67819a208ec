"""The gRPC server: its options, its port, its services."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from server.grpc_server.enduring import EnduringServer, GenericHandlers
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
    # For the servers of one door; another process must find the port taken, which is looked at beforehand.
    ("grpc.so_reuseport", 1),
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
        self._tenants = Tenants(options.tokens)
        self._native = NativeServicer(routes, self._tenants)
        self._vllm = VllmServicer(routes, self._tenants)
        self._server = EnduringServer(self._make_server, self._bind)

    async def start(self) -> str:
        """Open the port; return the address.

        Raises ValueError if the port cannot be had or the certificates cannot be used, OSError for a
        certificate file that cannot be read.
        """
        port = self._options.port
        check_free(self._options.host, port)
        try:
            bound = await self._server.start(port)
        except RuntimeError as error:
            raise ValueError(f"cannot listen on {self._host}:{port}: {error}") from error
        await self._set_health("", True)
        await self.update()
        return f"{self._host}:{bound}"

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

    @property
    def _host(self) -> str:
        """As addresses spell it."""
        host = self._options.host
        return f"[{host}]" if ":" in host else host

    def _make_server(self) -> grpc.aio.Server:
        guards: list[grpc.aio.ServerInterceptor] = [
            CallCount(self._routes.calls, (NATIVE_SERVICE, VLLM_SERVICE))
        ]
        guards += [] if self._options.tokens is None else [TokenGuard(self._tenants)]
        server = grpc.aio.server(interceptors=[*guards, DecodeGuard()], options=_OPTIONS)
        handlers: Any = GenericHandlers(server)
        engine_pb2_grpc.add_EngineServicer_to_server(self._native, handlers)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._vllm, handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, handlers)
        names = (NATIVE_SERVICE, VLLM_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, handlers)
        return server

    def _bind(self, server: grpc.aio.Server, port: int) -> int:
        address = f"{self._host}:{port}"
        if self._credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._credentials)

    @functools.cached_property
    def _credentials(self) -> grpc.ServerCredentials | None:
        """Read once, so that files that change meanwhile keep no port from being opened anew."""
        tls = self._options.tls
        if tls is None:
            return None
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
        if tls.client_ca is None:
            return grpc.ssl_server_credentials([pair])
        return grpc.ssl_server_credentials([pair], tls.client_ca.read_bytes(), require_client_auth=True)

    async def _set_health(self, name: str, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)
