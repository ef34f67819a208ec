"""Drives a host loop on the caller's own thread, and hands what it brings to whoever asked."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from jaxserve.interrupts import interrupts_deferred
from jaxserve.loop import HostLoop
from jaxserve.outputs import AnswerDelta, RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.prompts import EncodedPrompt
from jaxserve.scheduling import DEFAULT_TERMS, ServiceTerms

_Sink = Callable[[AnswerDelta], object]


class OfflineLoop:
    """Requests in, deltas out, a step whenever somebody waits. Not safe for use from several threads."""

    def __init__(self, loop: HostLoop) -> None:
        """Take over a loop; from now on nobody else may touch it."""
        self._loop = loop
        self._numbers = itertools.count()
        self._sinks: dict[str, _Sink] = {}
        self._dropped: deque[str] = deque()
        """Streams dropped before their end. The garbage collector may add one in the middle of a step."""

    def generate(
        self,
        prompts: Iterable[EncodedPrompt],
        params: Iterable[SamplingParams],
        on_finish: Callable[[RequestOutput], object],
    ) -> list[RequestOutput]:
        """Answer checked prompts, all queued at once; the results come in their order.

        `on_finish` is called with each as it finishes. Whatever raises, Ctrl-C included, aborts them all.
        """
        outputs: dict[str, RequestOutput] = {}

        def take(delta: AnswerDelta) -> None:
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
                on_finish(delta.output)

        names: list[str] = []
        try:
            with interrupts_deferred():
                for prompt, one in zip(prompts, params, strict=True):
                    names.append(self.submit(prompt, one, take))
            while len(outputs) < len(names):
                self.step()
        finally:
            self.abort(names)
        return [outputs[name] for name in names]

    def stream(self, prompt: EncodedPrompt, params: SamplingParams) -> AnswerIterator:
        """Queue a request. Raises ValueError if it could never be served."""
        inbox: deque[AnswerDelta] = deque()
        name = self.submit(prompt, params, inbox.append)
        return AnswerIterator(self, name, inbox)

    def submit(
        self, prompt: EncodedPrompt, params: SamplingParams, sink: _Sink, terms: ServiceTerms = DEFAULT_TERMS
    ) -> str:
        """Queue a request and return its name, for `abort`; each of its deltas goes to `sink` as it comes.

        Raises ValueError if it could never be served.
        """
        name = f"request-{next(self._numbers)}"
        self._loop.add(name, prompt.token_ids, params, prompt=prompt.text, terms=terms)
        self._sinks[name] = sink
        return name

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ValueError, naming the value and the limit, for a request that could never be served."""
        self._loop.check(prompt_token_ids, params)

    def step(self) -> None:
        """Run a step and hand out what it brings. Ctrl-C is seen after it, and leaves nothing half done."""
        with interrupts_deferred():
            while self._dropped:
                self._end(self._dropped.popleft())
            for delta in self._loop.step():
                sink = self._sinks.get(delta.request_id)
                if delta.output is not None:
                    self._sinks.pop(delta.request_id, None)
                if sink is not None:
                    sink(delta)

    def abort(self, names: Iterable[str]) -> None:
        """End requests, those that have ended excepted. Where no other is open, nothing is held then."""
        with interrupts_deferred():
            for name in names:
                self._end(name)
            while not (self._sinks or self._loop.idle) and self._loop.failure is None:
                self._loop.step()

    def close(self) -> None:
        """Abort everything."""
        self.abort([*self._sinks])

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pages, slots and requests account for one another.

        When no request is open, this means that every page and slot is free.
        """
        self.abort([*self._dropped])
        self._loop.check_integrity()

    def drop_later(self, name: str) -> None:
        """End a request before the next step. May be called at any moment, by a finaliser too."""
        self._dropped.append(name)

    def _end(self, name: str) -> None:
        if self._sinks.pop(name, None) is not None:
            self._loop.abort(name)


class AnswerIterator(Iterator[AnswerDelta]):
    """The deltas of one request, in order; the last one has the whole `output`.

    Every `next` moves all open requests on as far as it takes. Leaving early aborts the request: by
    `close`, by the end of a `with`, or by dropping the iterator.
    """

    def __init__(self, loop: OfflineLoop, request_id: str, inbox: deque[AnswerDelta]) -> None:
        self.request_id = request_id
        self._loop = loop
        self._inbox = inbox
        self._ended = False
        self._drop_if_open = weakref.finalize(self, loop.drop_later, request_id)
        self._drop_if_open.atexit = False

    def __next__(self) -> AnswerDelta:
        if self._ended:
            raise StopIteration
        while not self._inbox:
            self._loop.step()
        delta = self._inbox.popleft()
        if delta.output is not None:
            self._ended = True
            self._drop_if_open.detach()
        return delta

    def close(self) -> None:
        """Stop reading. A request that has not ended is aborted, and what it held is free."""
        if not self._ended:
            self._ended = True
            self._drop_if_open.detach()
            self._loop.abort([self.request_id])

    def __enter__(self) -> AnswerIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
