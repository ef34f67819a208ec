"""Asks every call for a token, whichever service it is for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from server.core import ServiceError
from server.core.tenants import Tenants
from server.grpc_server.status import abort

_OPEN_TO_ALL = "/grpc.health.v1.Health/"
"""Probes have no tokens, and what they learn is no secret."""


class TokenGuard(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED for a service's handler, unless the call has a known token."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        details: Any = handler_call_details  # grpc declares no fields for it
        if not details.method.startswith(_OPEN_TO_ALL):
            metadata = dict(details.invocation_metadata or ())
            try:
                self._tenants.authenticate(metadata.get("authorization", ""))
            except ServiceError as error:
                return _refuse(error, await continuation(handler_call_details))
        return await continuation(handler_call_details)


def _refuse(error: ServiceError, handler: Any) -> grpc.RpcMethodHandler:
    """A handler that does nothing but fail, for the same kind of call."""

    async def fail(request: Any, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    if handler is None:  # No such method: to one who may not know, it is all the same.
        return grpc.unary_unary_rpc_method_handler(fail)
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](fail)
