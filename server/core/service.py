"""One model as a service: deadlines, draining, and the answers themselves."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jaxserve.async_engine import Engine
from jaxserve.loop import LoopStoppedError
from jaxserve.outputs import RequestOutput
from jaxserve.plan import EngineLimits
from jaxserve.scheduling import CacheScope, KvSnapshot, OverloadError, ServiceTerms
from jaxserve.structured import CheckLostError
from jaxserve.text import Message, Tokenizer
from server.core.errors import ServiceError, Status, deadline_passed, engine_failed, from_engine
from server.core.generation import Generation
from server.core.grammars import GrammarChecks
from server.core.identity import ModelIdentity
from server.core.intake import Intake
from server.core.receipts import make_receipt
from server.core.requests import Choice, GenerateRequest, Receipt, RequestRecord
from server.core.statistics import RateMeter, Statistics, StatisticsOptions
from server.core.telemetry.watch import StreamWatch

_LONG_TEXT = 10_000
"""Characters from which on a text is encoded on a thread, so that no stream waits for it."""
_LEAST_IDS_LIMIT = 100_000
"""Token ids that may be turned into text at once, which takes about a microsecond each."""
_DRAIN_POLL = 0.01
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the engine was after its latest step."""

    num_running: int
    """Samples in slots."""
    num_waiting: int
    """Samples in the queue."""
    num_slots: int
    num_free_pages: int
    """Of the fullest cache group."""
    num_pages: int
    """Of the same group, the one that is never given out excepted."""
    page_size: int
    """Tokens on a page."""
    tokens_per_second: float
    """Sampled lately, over all requests."""

    @property
    def kv_usage(self) -> float:
        """Share of the pages that are held, from 0 to 1."""
        return 1.0 - self.num_free_pages / self.num_pages


class Service:
    """One engine and its tokenizer behind every door. Use it in one event loop."""

    def __init__(
        self,
        identity: ModelIdentity,
        tokenizer: Tokenizer,
        engine: Engine,
        *,
        sampling_defaults: Mapping[str, Any] | None = None,
        statistics: StatisticsOptions | None = None,
    ) -> None:
        """Serve a running engine, which stays the caller's to close.

        Args:
            identity: what is served.
            tokenizer: the one that the engine's loop streams text with.
            engine: runs on its own thread; its gate, if it has one, says who is turned away.
            sampling_defaults: the model's own values of parameters that a request leaves out, by name.
            statistics: what is promised and counted; by default nothing is promised.
        """
        self.identity = identity
        self.tokenizer = tokenizer
        self.engine = engine
        self.statistics = Statistics(engine.limits.max_model_len, statistics)
        self.observers: list[Callable[[RequestRecord], object]] = []
        """Called with each request when it has ended or was refused; they must not raise."""
        self.started_at = time.monotonic()
        self.sampling_defaults = dict(sampling_defaults or {})
        self._grammars = GrammarChecks(engine.grammars)
        self._meter = RateMeter()
        self._intake = Intake(tokenizer, engine.limits, self.sampling_defaults)
        self._draining = False
        self._open: weakref.WeakValueDictionary[str, Generation] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    @property
    def limits(self) -> EngineLimits:
        return self.engine.limits

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def ready(self) -> bool:
        """Whether a new request can be answered."""
        return not self._draining and self.engine.failure is None

    async def generate(self, request: GenerateRequest, route_reason: str = "requested") -> Generation:
        """Admit a request, whatever model it names, and return the stream of its deltas.

        `route_reason`: why it comes here, for the receipt.

        Raises ServiceError: INVALID_ARGUMENT for what could never be served, RESOURCE_EXHAUSTED when there
        is no room for it or its deadline will be missed as things go, DEADLINE_EXCEEDED when that has
        passed, UNAVAILABLE while draining, UNIMPLEMENTED for what this server does not have, INTERNAL after
        a failure of the engine.
        """
        arrival = time.monotonic()
        choice = Choice(route=self.identity.name, reason=route_reason)
        try:
            return await self._admit(request, choice, arrival)
        except ServiceError as error:
            self._report(_refusal(request, arrival, error))
            raise
        except asyncio.CancelledError:
            gone = ServiceError(Status.CANCELLED, "the client has gone")
            self._report(_refusal(request, arrival, gone))
            raise

    def abort(self, request_id: str, tenant: str = "") -> bool:
        """End a tenant's request with what it has; False if the tenant has no such request open."""
        name = _scoped(tenant, request_id)
        if name not in self._open:
            return False
        self.engine.abort(name)
        return True

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ServiceError, INVALID_ARGUMENT, for one that is longer
        than any sequence could spell."""
        if len(text) < _LONG_TEXT:
            return self._intake.encode(text, add_special_tokens)
        return await asyncio.to_thread(self._intake.encode, text, add_special_tokens)

    async def tokenize_messages(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation, by the chat template, the assistant's turn opened unless `variables`,
        which reach the template by name, say otherwise.

        Raises ServiceError, INVALID_ARGUMENT, if there is no template or it refuses.
        """
        rendered = self._intake.render(messages, variables or {})
        return await self.tokenize(rendered, add_special_tokens=False)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text that ids spell. Raises ServiceError for one outside the vocabulary, or for very many."""
        vocab_size = self.limits.vocab_size
        most = max(self.limits.max_model_len, _LEAST_IDS_LIMIT)
        if len(token_ids) > most:
            raise ServiceError(
                Status.INVALID_ARGUMENT, f"there are {len(token_ids)} token ids; the limit is {most}"
            )
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ServiceError(
                    Status.INVALID_ARGUMENT,
                    f"token id {token_id} is out of range: the vocabulary has {vocab_size} ids",
                )
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    async def clear_prefix_cache(self, scope: CacheScope | None = None) -> int:
        """Forget what is cached, or what one tenant or namespace shares of it; return how many pages.

        Open requests keep what they stand on. Raises ServiceError, INTERNAL, if the engine has failed.
        """
        return await _answer(self.engine.clear_prefix_cache, scope)

    async def snapshot_prefixes(self) -> KvSnapshot:
        """All that is cached. Raises as `clear_prefix_cache`."""
        return await _answer(self.engine.snapshot_prefixes)

    def load(self) -> Load:
        """How busy the engine is."""
        snapshot, limits = self.engine.snapshot(), self.limits
        free, total = min(
            zip(snapshot.num_free_pages, limits.num_pages, strict=True),
            key=lambda group: group[0] / (group[1] - 1),
        )
        return Load(
            num_running=snapshot.num_running,
            num_waiting=snapshot.num_waiting,
            num_slots=limits.num_slots,
            num_free_pages=free,
            num_pages=(total - 1) * limits.num_replicas,
            page_size=limits.page_size,
            tokens_per_second=self._meter.read(snapshot.num_sampled),
        )

    def start_draining(self) -> None:
        """From now on new requests are refused as UNAVAILABLE."""
        self._draining = True

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the open ones, so long at most; what is left then is ended as
        UNAVAILABLE. Returns whether all had ended by themselves."""
        self.start_draining()
        limit = time.monotonic() + seconds
        while self._open and self.engine.failure is None and time.monotonic() < limit:
            # Polled, as a stream may also end by being dropped, which the collector sees on any thread.
            await asyncio.sleep(_DRAIN_POLL)
        if self.engine.failure is not None:  # Its streams end by themselves.
            return False
        left = list(self._open.values())
        for generation in left:
            generation.fail(
                ServiceError(Status.UNAVAILABLE, "the server has shut down before the answer's end")
            )
        return not left

    async def _admit(self, request: GenerateRequest, choice: Choice, arrival: float) -> Generation:
        self._check_open()
        request.check()
        terms = request.terms(arrival)
        request = replace(request, priority=self._class_name(terms))
        self._check_room(terms)
        await self._grammars.check(request.params.grammar)
        token_ids = await self._encode(request)
        self._check_open()  # Encoding may have taken a while.
        request_id = request.request_id or f"generate-{next(self._numbers)}"
        name = _scoped(request.tenant, request_id)
        try:
            request = replace(request, params=self._intake.params(request, len(token_ids)))
            stream = self.engine.submit(token_ids, request.params, name, prompt=request.text, terms=terms)
        except OverloadError as error:
            raise _overloaded(error, terms) from error
        except (LoopStoppedError, CheckLostError, ValueError) as error:
            raise from_engine(error) from error
        watch = self.statistics.watch(arrival, request.params.n)
        timers: list[asyncio.TimerHandle] = []
        reuses = self.engine.kv_events is not None

        def on_end(output: RequestOutput | None, error: ServiceError | None) -> Receipt | None:
            for timer in timers:
                timer.cancel()
            self._open.pop(name, None)
            receipt = None
            if output is not None:
                speculation = self.engine.snapshot().speculation
                receipt = make_receipt(self.identity, request, output, choice, reuses, speculation)
            self._report(_record(request, request_id, len(token_ids), watch, output, error, receipt))
            return receipt

        generation = Generation(request_id, token_ids, choice, stream, watch, on_end)
        self._open[name] = generation
        if request.deadline is not None:
            # The engine ends it too, between two steps; this holds also where a step takes long.
            remaining = request.deadline - (time.monotonic() - arrival)
            expire = functools.partial(_expire, weakref.ref(generation))
            timers.append(asyncio.get_running_loop().call_later(remaining, expire))
        return generation

    def _check_open(self) -> None:
        if self._draining:
            raise ServiceError(Status.UNAVAILABLE, "the server is shutting down and takes no new requests")
        if self.engine.failure is not None:
            raise engine_failed(self.engine.failure)

    def _check_room(self, terms: ServiceTerms) -> None:
        """Raise ServiceError where a request is one too many, before its text and grammar cost anything."""
        try:
            self.engine.check_admission(terms)
        except OverloadError as error:
            raise _overloaded(error, terms) from error

    def _class_name(self, terms: ServiceTerms) -> str:
        """The class that a request is served in. Raises ServiceError, naming those that there are."""
        try:
            return self.engine.policy.priority_class(terms).name
        except ValueError as error:
            raise ServiceError(Status.INVALID_ARGUMENT, str(error)) from error

    async def _encode(self, request: GenerateRequest) -> Sequence[int]:
        if request.token_ids is not None:
            return request.token_ids
        text, add_special_tokens = self._intake.text(request)
        return await self.tokenize(text, add_special_tokens=add_special_tokens)

    def _report(self, record: RequestRecord) -> None:
        self.statistics.count(record)
        for observe in self.observers:
            observe(record)


def _record(
    request: GenerateRequest,
    request_id: str,
    num_prompt_tokens: int,
    watch: StreamWatch,
    output: RequestOutput | None,
    error: ServiceError | None,
    receipt: Receipt | None,
) -> RequestRecord:
    return RequestRecord(
        request=request,
        request_id=request_id,
        admitted=True,
        arrival_time=watch.arrival_time,
        first_token_time=watch.first_token_time,
        end_time=time.monotonic(),
        num_prompt_tokens=num_prompt_tokens,
        num_streamed=watch.num_tokens,
        output=output,
        error=error,
        receipt=receipt,
    )


def _refusal(request: GenerateRequest, arrival: float, error: ServiceError) -> RequestRecord:
    return RequestRecord(
        request=request,
        request_id=request.request_id or "",
        admitted=False,
        arrival_time=arrival,
        first_token_time=None,
        end_time=time.monotonic(),
        num_prompt_tokens=0,
        num_streamed=0,
        output=None,
        error=error,
        receipt=None,
    )


def _overloaded(error: OverloadError, terms: ServiceTerms) -> ServiceError:
    """What a client is told whom the gate turns away."""
    if terms.deadline is not None and time.monotonic() >= terms.deadline:
        return deadline_passed()
    return ServiceError(Status.RESOURCE_EXHAUSTED, error.message, error.retry_after, reason=error.reason)


async def _answer(ask: Callable[..., Future[_T]], *arguments: object) -> _T:
    """What the engine's thread answers between two steps."""
    try:
        return await asyncio.wrap_future(ask(*arguments))
    except LoopStoppedError as error:
        raise engine_failed(error.__cause__) from error


def _expire(reference: weakref.ref[Generation]) -> None:
    """A deadline has passed."""
    generation = reference()
    if generation is not None:
        generation.fail(deadline_passed())


def _scoped(tenant: str, request_id: str) -> str:
    """The engine's name of a request: two tenants may choose the same id."""
    return f"{tenant}:{request_id}" if tenant else request_id
