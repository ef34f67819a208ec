"""Bytes that are no message are the client's fault, and are answered as such."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from server.core import ServiceError, Status
from server.grpc_server.status import abort


class _Malformed:
    """Stands for a request that could not be read."""


class DecodeGuard(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT for a single request message that cannot be read.

    By itself gRPC takes that for an error of the server: UNKNOWN, and a traceback in the log for each.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if not handler or handler.request_streaming:  # No handler: no such method.
            return handler
        streams = handler.response_streaming
        make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        return make(
            _checked(handler.unary_stream if streams else handler.unary_unary),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return read


def _checked(behaviour: Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]) -> Any:
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, _Malformed):
            await abort(
                context, ServiceError(Status.INVALID_ARGUMENT, "the request is no message of its type")
            )
        return await behaviour(request, context)

    return answer
