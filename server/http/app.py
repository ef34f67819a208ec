"""The OpenAI-compatible door, as an ASGI application."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.core import Routes, ServiceError
from server.core.tenants import Tenants
from server.http.caller import BearerAuth
from server.http.calls import CallCount
from server.http.endpoints import Endpoints
from server.http.errors import ERROR_HEADERS, ApiError, from_service
from server.http.options import HttpOptions

_log = logging.getLogger("jaxserve.server")


def build_app(routes: Routes, options: HttpOptions | None = None) -> Starlette:
    """The application for a server's routes, to be run in their services' event loop.

    Answers /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /reset_prefix_cache,
    /health, /ready and /metrics. What goes wrong has the shape of OpenAI's errors, and no traceback leaves.
    """
    options = options or HttpOptions()
    at = Endpoints(routes, options)
    return Starlette(
        routes=[
            Route("/", at.root),
            Route("/v1/chat/completions", at.chat, methods=["POST"]),
            Route("/v1/completions", at.completions, methods=["POST"]),
            Route("/v1/models", at.models),
            Route("/v1/models/{name:path}", at.model),
            Route("/tokenize", at.tokenize, methods=["POST"]),
            Route("/detokenize", at.detokenize, methods=["POST"]),
            Route("/reset_prefix_cache", at.reset_prefix_cache, methods=["POST"]),
            Route("/health", at.health),
            Route("/ready", at.ready),
            Route("/ready/{name:path}", at.ready),
            Route("/metrics", at.metrics),
        ],
        middleware=_middleware(options, routes),
        exception_handlers={
            ApiError: _api_error,
            ServiceError: _service_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _unforeseen,
        },
    )


def _middleware(options: HttpOptions, routes: Routes) -> list[Middleware]:
    """The outermost first: a browser asks whether it may, before it shows a token."""
    count = Middleware(CallCount, calls=routes.calls)
    auth = Middleware(BearerAuth, tenants=Tenants(options.tokens))
    if not options.allow_origins:
        return [count, auth]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(options.allow_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-jaxserve-route", "x-jaxserve-route-reason", *ERROR_HEADERS],
    )
    return [count, cors, auth]


def _respond(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers())


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(error)


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return _respond(from_service(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """No such address, or not with this method."""
    assert isinstance(error, HTTPException)
    answer = _respond(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
    answer.headers.update(error.headers or {})
    return answer


async def _gone(request: Request, error: Exception) -> Response:
    """The client left while it sent its request: nobody reads this."""
    return Response(status_code=499)


async def _unforeseen(request: Request, error: Exception) -> Response:
    """The server's own fault; the framework raises the error again, so the log has it whole."""
    return _respond(ApiError(500, "internal error"))
