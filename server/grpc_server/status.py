"""From the service's errors to gRPC statuses."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from server.core import ServiceError, Status

RETRY_METADATA = "grpc-retry-pushback-ms"
"""gRPC's own key (proposal A6): clients with a retry policy heed it by themselves."""
REASON_METADATA = "jaxserve-reason"
"""What there is too much of, in a word."""

GRPC_CODES: dict[Status, grpc.StatusCode] = {
    Status.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Status.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Status.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Status.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Status.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Status.CANCELLED: grpc.StatusCode.CANCELLED,
    Status.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Status.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    Status.INTERNAL: grpc.StatusCode.INTERNAL,
}

_log = logging.getLogger("jaxserve.server")
_Result = TypeVar("_Result")
_Handler = Callable[[Any, Any, grpc.aio.ServicerContext], Awaitable[_Result]]


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    """End a call with an error; raises what gRPC wants raised for that."""
    metadata: list[tuple[str, str]] = []
    if error.retry_after is not None:
        metadata.append((RETRY_METADATA, str(round(error.retry_after * 1000))))
    if error.reason:
        metadata.append((REASON_METADATA, error.reason))
    await context.abort(GRPC_CODES[error.status], error.message, tuple(metadata))


def reports_errors(handler: _Handler[_Result]) -> _Handler[_Result]:
    """Decorate a servicer's method: its ServiceErrors become statuses.

    An error that nobody foresaw is INTERNAL; the log has its traceback and the client has not.
    """

    @functools.wraps(handler)
    async def wrapper(servicer: Any, request: Any, context: grpc.aio.ServicerContext) -> _Result:
        try:
            return await handler(servicer, request, context)
        except ServiceError as caught:
            error = caught
        except grpc.aio.BaseError:
            raise
        except Exception:
            _log.exception("unforeseen error in %s", handler.__qualname__)
            error = ServiceError(Status.INTERNAL, "an error of the server; its log has the cause")
        await abort(context, error)
        raise AssertionError("abort raises")

    return wrapper
