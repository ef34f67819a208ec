"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from jaxserve.outputs import RequestOutput
from server.core import Generation, ServiceError, Status
from server.http.answers import AnswerFormat, Json, usage_of
from server.http.errors import ApiError, from_service
from server.http.streams import merged, while_connected

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

_log = logging.getLogger("jaxserve.server")


def event(body: Json) -> bytes:
    """One event."""
    return b"data: " + _to_json(body).encode() + b"\n\n"


class EventStream:
    """An ASGI response that streams the answer to one call and ends it when the client goes or stalls."""

    def __init__(
        self,
        generations: Sequence[Generation],
        answer: AnswerFormat,
        *,
        include_usage: bool,
        stall_seconds: float,
        headers: Mapping[str, str],
    ) -> None:
        """stall_seconds: how long a client may take no byte before its requests are aborted."""
        self._generations = generations
        self._answer = answer
        self._include_usage = include_usage
        self._stall_seconds = stall_seconds
        self._headers = _HEADERS + [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ServiceError as error:
            if error.status is not Status.CANCELLED:
                raise
        finally:
            for generation in self._generations:
                await generation.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async with aclosing(self._events()) as events:
            async for data in events:
                try:
                    async with asyncio.timeout(self._stall_seconds):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                except TimeoutError:
                    _log.warning("a client took nothing for %g s: aborted", self._stall_seconds)
                    raise ServiceError(Status.CANCELLED, "the client reads nothing") from None
        await send({"type": "http.response.body", "body": _DONE})

    async def _events(self) -> AsyncGenerator[bytes]:
        """Every event but the last; an error is one too, as the status has gone out already."""
        try:
            async with aclosing(self._chunks()) as chunks:
                async for data in chunks:
                    yield data
        except ServiceError as error:
            yield event(from_service(error).body())
        except Exception:
            _log.exception("a stream broke off")
            yield event(ApiError(500, "internal error").body())

    async def _chunks(self) -> AsyncGenerator[bytes]:
        prompts = [generation.prompt_token_ids for generation in self._generations]
        for chunk in self._answer.opening(prompts):
            yield self._event(chunk)
        outputs: list[RequestOutput] = []
        async with aclosing(merged(self._generations)) as batches:
            async for index, deltas in batches:
                chunks = [self._answer.chunk(index, delta) for delta in deltas]
                outputs.extend(delta.output for delta in deltas if delta.output is not None)
                if data := b"".join(self._event(chunk) for chunk in chunks if chunk is not None):
                    yield data
        if self._include_usage:
            yield event(self._answer.closing(usage_of(outputs)))

    def _event(self, chunk: Json) -> bytes:
        return event(chunk | {"usage": None} if self._include_usage else chunk)
