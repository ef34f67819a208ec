"""Counts what the gRPC door answers, also where no model was asked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

_DOOR = "grpc"
_Behaviour = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class CallCount(grpc.aio.ServerInterceptor):
    """One more of (door, method, status), for the calls of one service's kind: a single request message."""

    def __init__(self, calls: Counter[tuple[str, str, str]], services: tuple[str, ...]) -> None:
        """`services`: full names of those that are counted."""
        self._calls = calls
        self._prefixes = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        details: Any = handler_call_details  # grpc declares no fields for it
        handler: Any = await continuation(handler_call_details)
        if not handler or handler.request_streaming or not details.method.startswith(self._prefixes):
            return handler
        streams = handler.response_streaming
        make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        behaviour = handler.unary_stream if streams else handler.unary_unary
        return make(
            self._counted(behaviour, details.method.removeprefix("/")),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _counted(self, behaviour: _Behaviour, call: str) -> Any:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            code = grpc.StatusCode.OK
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except BaseException:
                code = context.code() or grpc.StatusCode.UNKNOWN
                raise
            finally:
                self._calls[_DOOR, call, _name(code)] += 1

        return answer


def _name(code: Any) -> str:
    """Of a status, which gRPC keeps as a number at times."""
    found = code if isinstance(code, grpc.StatusCode) else _BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN)
    return found.name.lower()


_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
