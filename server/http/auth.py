"""Bearer tokens, and the tenants that they stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""For probes and scrapers: they say nothing of any request."""


class BearerAuth:
    """Middleware: 401 without a known token; `scope["tenant"]` is whose it is, "" where none is asked for."""

    def __init__(self, app: ASGIApp, tenants: Mapping[str, str] | None) -> None:
        self._app = app
        # Looked up by digest: how long a look-up takes tells nothing of a token.
        self._tenants = None if tenants is None else {_digest(token): name for token, name in tenants.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                scope["tenant"] = self._tenant(scope)
            except ApiError as error:
                app = JSONResponse(error.body(), error.status, headers=error.headers())
        await app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        if self._tenants is None or scope["path"] in OPEN_PATHS:
            return ""
        kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            raise ApiError(401, "a bearer token is needed", code="missing_api_key")
        tenant = self._tenants.get(_digest(token.strip()))
        if tenant is None:
            raise ApiError(401, "the bearer token is not known", code="invalid_api_key")
        return tenant


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
