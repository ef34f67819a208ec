"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from jaxserve.outputs import AnswerDelta, RequestOutput
from server.core import Generation, ServiceError, Status
from server.http.answers import AnswerFormat, Json, usage_of
from server.http.errors import ApiError, from_service
from server.http.streams import Patience, merged, while_connected

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_ANY_TEXT = "\ue000text\ue000"
"""Stands for the text in what every event of a choice has in common; private use, so it is in no name."""
_Emit = Callable[[bytes], Awaitable[None]]
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

_log = logging.getLogger("jaxserve.server")


def event(body: Json) -> bytes:
    """One event."""
    return b"data: " + _to_json(body).encode() + b"\n\n"


class EventWriter:
    """Writes the chunks of one answer as events.

    Most deltas are a piece of text and nothing else: what stands around it is written once.
    """

    def __init__(self, answer: AnswerFormat, *, include_usage: bool) -> None:
        """include_usage: every chunk says that it has no usage, as one at the end has it."""
        self._answer = answer
        self._include_usage = include_usage
        self._frames: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """What stands before and after the text, by prompt and sample."""

    def chunk(self, chunk: Json) -> bytes:
        return event(chunk | {"usage": None} if self._include_usage else chunk)

    def delta(self, prompt_index: int, delta: AnswerDelta) -> bytes:
        """The event of a delta; nothing, if it has nothing to show."""
        if self._answer.plain and delta.text and delta.finish_reason is None and not delta.logprobs:
            before, after = self._frame(prompt_index, delta.index)
            return before + _to_json(delta.text).encode() + after
        chunk = self._answer.chunk(prompt_index, delta)
        return b"" if chunk is None else self.chunk(chunk)

    def _frame(self, prompt_index: int, sample_index: int) -> tuple[bytes, bytes]:
        frame = self._frames.get((prompt_index, sample_index))
        if frame is None:
            delta = AnswerDelta("", sample_index, (), _ANY_TEXT, None, None, None)
            chunk = self._answer.chunk(prompt_index, delta)
            assert chunk is not None, "a text is something to show"
            before, _, after = self.chunk(chunk).partition(_to_json(_ANY_TEXT).encode())
            frame = self._frames[prompt_index, sample_index] = before, after
        return frame


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
        try:
            async with Patience(self._stall_seconds) as patience:
                await self._send_events(send, patience)
        except TimeoutError:
            _log.warning("a client took nothing for %g s: aborted", self._stall_seconds)
            raise ServiceError(Status.CANCELLED, "the client reads nothing") from None
        await send({"type": "http.response.body", "body": _DONE})

    async def _send_events(self, send: Send, patience: Patience) -> None:
        """Every event but the last; an error is one too, as the status has gone out already."""

        async def emit(data: bytes) -> None:
            patience.begin()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            patience.end()

        try:
            await self._send_answer(emit)
        except ServiceError as error:
            await emit(event(from_service(error).body()))
        except Exception:
            _log.exception("a stream broke off")
            await emit(event(ApiError(500, "internal error").body()))

    async def _send_answer(self, emit: _Emit) -> None:
        writer = EventWriter(self._answer, include_usage=self._include_usage)
        prompts = [generation.prompt_token_ids for generation in self._generations]
        if opening := b"".join(map(writer.chunk, self._answer.opening(prompts))):
            await emit(opening)
        outputs: list[RequestOutput] = []
        async with aclosing(merged(self._generations)) as batches:
            async for index, deltas in batches:
                outputs.extend(delta.output for delta in deltas if delta.output is not None)
                if data := b"".join([writer.delta(index, delta) for delta in deltas]):
                    await emit(data)
        if self._include_usage:
            await emit(event(self._answer.closing(usage_of(outputs))))
