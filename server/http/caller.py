"""Who calls, in which trace: what a request's headers say of it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from server.core import ServiceError
from server.core.tenants import Tenants
from server.http.errors import from_service

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""For probes and scrapers: they say nothing of any request."""


class BearerAuth:
    """Middleware: 401 without a known token; `scope["tenant"]` is whose it is, "" where none is asked for."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                scope["tenant"] = self._tenant(scope)
            except ServiceError as error:
                refusal = from_service(error)
                app = JSONResponse(refusal.body(), refusal.status, headers=refusal.headers())
        await app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        if scope["path"] in OPEN_PATHS or scope["path"].startswith("/ready/"):
            return ""
        return self._tenants.authenticate(Headers(scope=scope).get("authorization", ""))
