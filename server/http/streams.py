"""Streams of deltas on their way to a client: merged, collected, and ended when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar

from starlette.types import Receive

from jaxserve.outputs import AnswerDelta, RequestOutput
from server.core import Generation, ServiceError, Status

T = TypeVar("T")
_Item = tuple[int, list[AnswerDelta]] | BaseException


class Patience:
    """Ends with TimeoutError what waits too long for a client, as an `async with` around it.

    The waits themselves, between `begin` and `end`, may be many and short: each costs no timer of its own.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: that a single wait may take."""
        self._seconds = seconds
        self._since: float | None = None
        self._limit = asyncio.timeout(None)

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    async def __aenter__(self) -> Patience:
        self._loop = asyncio.get_running_loop()
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _look(self) -> None:
        """Whether a wait has lasted too long; if not, look again when one could have."""
        now = self._loop.time()
        end = (now if self._since is None else self._since) + self._seconds
        if end <= now:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(end, self._look)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it if the client goes first. The request's body must have been read.

    Raises ServiceError, CANCELLED, if the client has gone.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ServiceError(Status.CANCELLED, "the client has gone")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(generations: Sequence[Generation]) -> list[RequestOutput]:
    """The finished requests, in order."""
    return [await _finish(generation) for generation in generations]


async def _finish(generation: Generation) -> RequestOutput:
    while deltas := await generation.next_batch():
        if (output := deltas[-1].output) is not None:
            return output
    raise ServiceError(Status.INTERNAL, "the answer ended before its end")


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, list[AnswerDelta]]]:
    """What comes, with the index of its generation. Whoever reads slowly gets more at once.

    Holds back at most one batch of each generation, so that a slow reader's deltas pile up nowhere but in
    the engine's stream, which joins them. Raises ServiceError as the generations do; closes none of them.
    """
    if len(generations) == 1:
        while deltas := await generations[0].next_batch():
            yield 0, joined(deltas)
        return
    queue: asyncio.Queue[_Item | None] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(*numbered, queue)) for numbered in enumerate(generations)]
    try:
        num_open = len(pumps)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, generation: Generation, queue: asyncio.Queue[_Item | None]) -> None:
    try:
        while deltas := await generation.next_batch():
            await queue.put((index, joined(deltas)))
        await queue.put(None)
    except Exception as error:  # Raised again where the queue is read.
        await queue.put(error)


def joined(deltas: list[AnswerDelta]) -> list[AnswerDelta]:
    """One delta for each sample, in the order of first appearance."""
    if len(deltas) == 1:
        return deltas
    by_sample: dict[int, list[AnswerDelta]] = {}
    for delta in deltas:
        by_sample.setdefault(delta.index, []).append(delta)
    return [_join(parts) for parts in by_sample.values()]


def _join(parts: list[AnswerDelta]) -> AnswerDelta:
    last = parts[-1]
    if len(parts) == 1:
        return last
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return last._replace(
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        text="".join(part.text for part in parts),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=parts[0].prompt_logprobs,
    )
