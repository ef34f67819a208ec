"""The asynchronous face of the host loop: it runs on a thread of its own and feeds asyncio streams."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from jaxserve.gates import GrammarSource
from jaxserve.loop import HostLoop, LoopStoppedError
from jaxserve.loop_stats import LoopSnapshot
from jaxserve.outputs import AnswerDelta
from jaxserve.plan import EngineLimits, SamplingParams
from jaxserve.scheduling import (
    DEFAULT_TERMS,
    CacheScope,
    ClassLoad,
    KvEventLog,
    KvSnapshot,
    SchedulerPolicy,
    ServiceTerms,
)
from jaxserve.structured import CheckLostError

_Item = AnswerDelta | Exception
_T = TypeVar("_T")


class AnswerStream:
    """The deltas of one request, in order: iterate with `async for`, in the event loop that submitted it.

    Ends after the delta whose `output` is the finished request. If the engine fails, raises
    LoopStoppedError (INTERNAL, to a server's clients); where a grammar that was checked before cannot be
    compiled again, what `submit` would have. Whoever stops listening aborts the request: by
    `aclose`, by the end of an `async with`, by cancelling a task that waits here, or by dropping the stream.
    """

    def __init__(self, request_id: str, queue: asyncio.Queue[_Item], abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self._queue = queue
        self._ended = False
        self._abort_if_open = weakref.finalize(self, abort)
        self._abort_if_open.atexit = False

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> AnswerDelta:
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, Exception):
            self._end()
            raise item
        if item.output is not None:
            self._end()
        return item

    def take_ready(self) -> list[AnswerDelta]:
        """The deltas that have arrived already, without waiting; a failure is left for the iteration."""
        ready: list[AnswerDelta] = []
        while not (self._ended or self._queue.empty()):
            item = self._queue.get_nowait()
            if isinstance(item, Exception):
                self._queue.put_nowait(item)
                break
            if item.output is not None:
                self._end()
            ready.append(item)
        return ready

    def interrupt(self, error: Exception) -> None:
        """Abort the request, and raise this in whoever listens, after what has arrived: also if the engine
        hangs. Call it in the stream's event loop. No effect on a stream that has ended."""
        if not self._ended:
            self._queue.put_nowait(error)
            self._abort_if_open()

    async def aclose(self) -> None:
        """Stop listening; a request that has not ended is aborted. Does not wait for that."""
        self._ended = True
        self._abort_if_open()

    async def __aenter__(self) -> AnswerStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _end(self) -> None:
        self._ended = True
        self._abort_if_open.detach()


class _Subscriber:
    """Where the deltas of one request go."""

    __slots__ = ("event_loop", "queue")

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[_Item] = asyncio.Queue()


class Engine:
    """Runs a HostLoop on its own thread. `submit`, `abort` and `close` may be called from any thread.

    The thread sleeps while there is nothing to do. An error of the loop reaches every open stream and
    whoever calls `close`; nothing is served afterwards.
    """

    def __init__(self, loop: HostLoop) -> None:
        """Take over a loop; from now on nobody else may touch it."""
        self._loop = loop
        self._wake = threading.Condition()
        """Guards what follows, up to the thread."""
        self._commands: deque[Callable[[], object]] = deque()
        self._subscribers: dict[str, _Subscriber] = {}
        self._questions: set[Future[Any]] = set()
        """Asked of the thread and not answered yet."""
        self._closing = False
        self._failure: LoopStoppedError | None = None
        self._numbers = itertools.count()
        self._snapshot = loop.snapshot()
        """Replaced as a whole by the thread after each step, so reading it needs no lock."""
        self._thread = threading.Thread(target=self._run, name="jaxserve-loop", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> EngineLimits:
        return self._loop.limits

    @property
    def grammars(self) -> GrammarSource | None:
        """See HostLoop. Compile a grammar there, from any thread but an event loop's, before submitting a
        request that has it: else the engine's thread does, and everybody waits."""
        return self._loop.grammars

    @property
    def policy(self) -> SchedulerPolicy:
        """Who goes next, and what classes there are."""
        return self._loop.policy

    @property
    def kv_events(self) -> KvEventLog | None:
        """See HostLoop."""
        return self._loop.kv_events

    @property
    def failure(self) -> BaseException | None:
        """What stopped the engine, if something did."""
        return None if self._failure is None else self._failure.__cause__

    @property
    def num_open(self) -> int:
        """Requests that have been submitted and have not ended, the latest included."""
        return len(self._subscribers)

    def snapshot(self) -> LoopSnapshot:
        """How the loop stood after its latest step."""
        return self._snapshot

    def class_loads(self) -> tuple[ClassLoad, ...]:
        """How every priority class stands now; empty where nobody is ever turned away."""
        return self._loop.class_loads()

    def check_admission(self, terms: ServiceTerms) -> None:
        """Raise as `submit` does where it would refuse even the smallest request on these terms: before work
        goes into finding out how large one is."""
        self._loop.check_admission(terms)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        prompt: str | None = None,
        terms: ServiceTerms = DEFAULT_TERMS,
    ) -> AnswerStream:
        """Queue a request and return the stream of its deltas. Call it inside a running event loop.

        Args:
            prompt_token_ids: the prompt.
            params: how to sample.
            request_id: a name that no open request has; by default a fresh one.
            prompt: the prompt's text, for the record.
            terms: when to serve it, and what it may share.

        Raises:
            ValueError: the request could never be served, or its id is in use.
            CheckLostError: its grammar could not be checked now.
            OverloadError: it is refused for now.
            LoopStoppedError: the engine has failed or is closed.
        """
        self._loop.check(prompt_token_ids, params)
        subscriber = _Subscriber()
        prompt_token_ids = list(prompt_token_ids)
        with self._wake:
            self._check_open()
            name = f"request-{next(self._numbers)}" if request_id is None else request_id
            if name in self._subscribers:
                raise ValueError(f"request id {name!r} is in use by a request that has not ended")
            ticket = self._loop.admit(prompt_token_ids, params, terms)
            self._subscribers[name] = subscriber
            self._commands.append(
                lambda: self._begin(name, prompt_token_ids, params, prompt=prompt, terms=terms, ticket=ticket)
            )
            self._wake.notify()
        return AnswerStream(name, subscriber.queue, lambda: self.abort(name))

    def abort(self, request_id: str) -> None:
        """End a request with what it has; its stream gets a last delta. No effect on one that has ended."""
        with self._wake:
            if request_id in self._subscribers:
                self._commands.append(lambda: self._loop.abort(request_id))
                self._wake.notify()

    def clear_prefix_cache(self, scope: CacheScope | None = None) -> Future[int]:
        """Forget what is cached, or what one tenant or namespace shares of it: see HostLoop.

        Returns at once; the result comes between two steps. Raises LoopStoppedError, here or as the result,
        if the engine has failed or is closed.
        """
        return self._ask(lambda: self._loop.clear_prefix_cache(scope))

    def snapshot_prefixes(self) -> Future[KvSnapshot]:
        """All that is cached; otherwise as `clear_prefix_cache`."""
        return self._ask(self._loop.snapshot_prefixes)

    def _ask(self, question: Callable[[], _T]) -> Future[_T]:
        """Have the thread answer between two steps."""
        future: Future[_T] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(question())
            self._questions.discard(future)

        with self._wake:
            self._check_open()
            self._questions.add(future)
            self._commands.append(answer)
            self._wake.notify()
        return future

    def fail(self, error: Exception) -> None:
        """Give up: every open stream ends with this, also where the engine hangs; nothing is served after."""
        self._fail(error)

    def close(self) -> None:
        """Abort what is open, stop the thread and wait for it.

        Raises LoopStoppedError, from its cause, if the engine has failed.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise LoopStoppedError(str(self._failure)) from self._failure.__cause__
        if self._closing:
            raise LoopStoppedError("the engine is closed")

    # On the loop's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                deltas = self._loop.step()
                self._snapshot = self._loop.snapshot()
                self._deliver(deltas)
        except BaseException as error:  # Kept for every stream and for close(): a thread has no caller.
            self._fail(error)

    def _obey(self) -> bool:
        """Carry out what was asked for, sleeping until there is something to do; False once it is to end."""
        with self._wake:
            while not (self._commands or self._closing) and self._loop.idle:
                self._wake.wait()
            commands, self._commands = self._commands, deque()
            closing = self._closing
            if closing:
                commands.extend(self._abort_command(name) for name in self._subscribers)
        for command in commands:
            command()
        return not (closing and self._loop.idle)

    def _begin(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Add a request to the loop, as its `add` takes it.

        It has been checked; but a grammar may have been forgotten since, and not be compiled again in bounds.
        """
        try:
            self._loop.add(name, *args, **kwargs)
        except (ValueError, CheckLostError) as error:
            if self._loop.abort(name):  # It was taken in, so that this is no refusal.
                raise
            with self._wake:
                subscriber = self._subscribers.pop(name)
            self._post(subscriber.event_loop, [(subscriber.queue, error)])

    def _abort_command(self, request_id: str) -> Callable[[], object]:
        return lambda: self._loop.abort(request_id)

    def _deliver(self, deltas: list[AnswerDelta]) -> None:
        """Hand the deltas to their streams, waking each event loop once."""
        if not deltas:
            return
        batches: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[_Item], _Item]]] = {}
        with self._wake:
            for delta in deltas:
                subscriber = self._subscribers[delta.request_id]
                batches.setdefault(subscriber.event_loop, []).append((subscriber.queue, delta))
                if delta.output is not None:
                    del self._subscribers[delta.request_id]
        for event_loop, batch in batches.items():
            self._post(event_loop, batch)

    def _post(
        self, event_loop: asyncio.AbstractEventLoop, batch: list[tuple[asyncio.Queue[_Item], _Item]]
    ) -> None:
        try:
            event_loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:
            if not event_loop.is_closed():
                raise
            self._abort_orphans(event_loop)

    def _abort_orphans(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """An event loop was closed over its open streams: nobody will ever read them."""
        with self._wake:
            for name, subscriber in self._subscribers.items():
                if subscriber.event_loop is event_loop:
                    self._commands.append(self._abort_command(name))

    def _fail(self, error: BaseException) -> None:
        failure = _stopped_by(error)
        with self._wake:
            if self._failure is not None:
                return
            self._failure = failure
            subscribers = list(self._subscribers.values())
            self._subscribers.clear()
            questions, self._questions = self._questions, set()
        for question in questions:
            if not question.done():
                question.set_exception(_stopped_by(error))
        for subscriber in subscribers:
            own = _stopped_by(error)  # An exception raised in several tasks must not be shared.
            self._post(subscriber.event_loop, [(subscriber.queue, own)])


def _stopped_by(error: BaseException) -> LoopStoppedError:
    failure = LoopStoppedError(f"the engine was stopped by {error!r}")
    failure.__cause__ = error
    return failure


def _put_all(batch: list[tuple[asyncio.Queue[_Item], _Item]]) -> None:
    for queue, item in batch:
        queue.put_nowait(item)
