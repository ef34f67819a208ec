"""Counts what the HTTP door answers, also where no model was asked."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DOOR = "http"
_UNKNOWN = "unknown"


class CallCount:
    """Middleware: one more of (door, call, status code), where a call is the address' method."""

    def __init__(self, app: ASGIApp, calls: Counter[tuple[str, str, str]]) -> None:
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The router writes the endpoint into the scope; without one there is no such address.
                call = getattr(scope.get("endpoint"), "__name__", _UNKNOWN)
                self._calls[_DOOR, call, str(message["status"])] += 1
            await send(message)

        await self._app(scope, receive, send_counted if scope["type"] == "http" else send)
