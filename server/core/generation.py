"""The stream of one admitted request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from jaxserve.async_engine import AnswerStream
from jaxserve.loop import LoopStoppedError
from jaxserve.outputs import AnswerDelta, RequestOutput
from jaxserve.structured import CheckLostError
from server.core.errors import ServiceError, Status, deadline_passed, from_engine
from server.core.requests import Choice, Receipt
from server.core.telemetry.watch import StreamWatch

OnEnd = Callable[[RequestOutput | None, ServiceError | None], Receipt | None]


class Generation:
    """The deltas of one request, in order, in the event loop of the service.

    Ends after the delta whose `output` is the finished request, or with a ServiceError. Whoever stops
    listening aborts the request: by `aclose`, by the end of an `async with`, or by cancelling a task that
    waits here. One that was aborted by name ends as an answer whose finish reason is "abort". A delta's own
    request id is the engine's name of it, which differs from this one's where there are tenants.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        choice: Choice,
        stream: AnswerStream,
        watch: StreamWatch,
        on_end: OnEnd,
    ) -> None:
        """`watch` sees every delta; `on_end` is called once: with the output, of which it returns the
        receipt, or with why there is none."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.choice = choice
        self._stream = stream
        self._watch = watch
        self._on_end = on_end
        self._ended = False
        self._result: tuple[RequestOutput, Receipt] | None = None
        self._failure: ServiceError | None = None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> AnswerDelta:
        self._raise_failure()
        try:
            delta = await anext(self._stream)
        except asyncio.CancelledError:
            await self.aclose()
            raise
        except (LoopStoppedError, CheckLostError, ValueError) as error:
            failure = from_engine(error)
            self.fail(failure)
            raise failure from error
        self._end_if_expired(delta)
        self._raise_failure()
        self._pass(delta)
        return delta

    async def next_batch(self) -> list[AnswerDelta]:
        """The next delta, and those that have come since a slow reader's last one; empty at the end."""
        try:
            deltas = [await anext(self)]
        except StopAsyncIteration:
            return []
        for delta in self._stream.take_ready():
            if self._end_if_expired(delta):
                break
            self._pass(delta)
            deltas.append(delta)
        return deltas

    def result(self) -> tuple[RequestOutput, Receipt]:
        """The finished request, and how it came about. Raises RuntimeError before the end of the stream."""
        if self._result is None:
            raise RuntimeError(f"the answer to request {self.request_id!r} has not come to its end")
        return self._result

    def fail(self, error: ServiceError) -> None:
        """Abort the request; whoever reads the stream gets this error next. No effect on an ended one."""
        if not self._ended:
            self._failure = error
            self._stream.interrupt(error)
            self._end(None, error)

    async def aclose(self) -> None:
        """Stop listening; a request that has not ended is aborted. Does not wait for that."""
        if not self._ended:
            self._end(None, ServiceError(Status.CANCELLED, "the client has gone"))
        await self._stream.aclose()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end_if_expired(self, delta: AnswerDelta) -> bool:
        """Fail if the engine has ended a sample at the request's deadline, which ends them all."""
        expired = delta.finish_reason == "expired"
        if expired:
            self.fail(deadline_passed())
        return expired

    def _pass(self, delta: AnswerDelta) -> None:
        self._watch.take(delta)
        if delta.output is not None:
            self._end(delta.output, None)

    def _end(self, output: RequestOutput | None, error: ServiceError | None) -> None:
        self._ended = True
        receipt = self._on_end(output, error)
        if output is not None and receipt is not None:
            self._result = (output, receipt)
