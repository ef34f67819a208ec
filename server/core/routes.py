"""The models of one server by the names that requests call them, and who answers what one of them refuses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

from server.core.errors import ServiceError, Status
from server.core.generation import Generation
from server.core.requests import GenerateRequest
from server.core.service import Service

_PASSED_ON = frozenset({Status.RESOURCE_EXHAUSTED, Status.UNAVAILABLE, Status.INTERNAL})
"""Refusals that say nothing against the request: another route may take it."""
_LOADING_RETRY = 5.0
"""Seconds after which asking again is worth it while a model loads."""


class RouteState(Enum):
    """How a route stands."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Routes:
    """What every door stands on: services by name, of which some may still be loading.

    Use it in one event loop, that of the services.
    """

    def __init__(self, fallbacks: Mapping[str, str | None]) -> None:
        """Declare every route; `open` makes one ready.

        Args:
            fallbacks: for each route, in order, the one that takes its overflow, if one does. The first
                route answers requests that name none.

        Raises ValueError for no route, an unknown fallback, or fallbacks that lead back to where they began.
        """
        if not fallbacks:
            raise ValueError("a server needs at least one route")
        self._fallbacks = dict(fallbacks)
        self._services: dict[str, Service] = {}
        self._observers: list[Callable[[Service], object]] = []
        self._draining = False
        self.calls: Counter[tuple[str, str, str]] = Counter()
        """Calls answered, by door, call and code: also those that reached no model. The doors count."""
        for name in self._fallbacks:
            self._check_chain(name)

    @classmethod
    def of(cls, *services: Service) -> Routes:
        """Routes that are ready, without fallbacks."""
        routes = cls(dict.fromkeys(service.identity.name for service in services))
        for service in services:
            routes.open(service)
        return routes

    @property
    def names(self) -> tuple[str, ...]:
        """Of every route, loaded or not, in the order of their declaration."""
        return tuple(self._fallbacks)

    @property
    def default(self) -> str:
        """The route of requests that name none."""
        return next(iter(self._fallbacks))

    @property
    def services(self) -> tuple[Service, ...]:
        """Those that are loaded, in the order of their routes."""
        return tuple(self._services[name] for name in self._fallbacks if name in self._services)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def loaded(self) -> bool:
        """Whether no route is loading any more."""
        return len(self._services) == len(self._fallbacks)

    @property
    def ready(self) -> bool:
        """Whether every route can answer a new request."""
        return self.loaded and all(service.ready for service in self.services)

    @property
    def failure(self) -> BaseException | None:
        """What stopped an engine, if something did."""
        failures = (service.engine.failure for service in self.services)
        return next((failure for failure in failures if failure is not None), None)

    def fallback(self, name: str) -> str | None:
        """The route that takes the overflow of another."""
        return self._fallbacks[name]

    def state(self, name: str) -> RouteState:
        """How a route stands. Raises ServiceError, NOT_FOUND, for a name that no route has."""
        service = self._services.get(self.resolve(name, "model"))
        if service is None:
            return RouteState.DRAINING if self._draining else RouteState.LOADING
        if service.engine.failure is not None:
            return RouteState.FAILED
        return RouteState.DRAINING if service.draining else RouteState.READY

    def open(self, service: Service) -> None:
        """A route is loaded: it has the name of the service's identity.

        Raises ValueError for a name that was not declared, or is open already.
        """
        name = service.identity.name
        if name not in self._fallbacks or name in self._services:
            raise ValueError(f"route {name!r} is not one that waits for its model")
        self._services[name] = service
        if self._draining:
            service.start_draining()
        for observe in self._observers:
            observe(service)

    def watch(self, observe: Callable[[Service], object]) -> None:
        """Call `observe` with every service, now or when it is opened."""
        self._observers.append(observe)
        for service in self.services:
            observe(service)

    def service(self, model: str | None = None) -> Service:
        """The service of a route, by default the first.

        Raises ServiceError: NOT_FOUND for a name that no route has, UNAVAILABLE while it loads.
        """
        name = self.resolve(model, "model")
        service = self._services.get(name)
        if service is None:
            raise ServiceError(Status.UNAVAILABLE, f"model {name!r} is loading", _LOADING_RETRY)
        return service

    async def generate(self, request: GenerateRequest) -> Generation:
        """Admit a request on the route that it names, or on a fallback if that refuses.

        The stream's `choice` says which one it is. Raises ServiceError as the named route's service does;
        NOT_FOUND for an unknown route; UNAVAILABLE while it loads.
        """
        (generation,) = await self.generate_all([request])
        return generation

    async def generate_all(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Admit requests that name the same route and fallback: all of them on one route, or none."""
        model, accepted = requests[0].model, requests[0].fallback_route
        first, *others = self._chain(self.resolve(model, "model"), accepted)
        try:
            return await self._admit(first, requests, "requested" if model else "default")
        except ServiceError as error:
            if error.status not in _PASSED_ON:
                raise
            refusal = error
        kind = "overflow" if refusal.status is Status.RESOURCE_EXHAUSTED else "failover"
        told = [refusal.message]
        for name in others:
            try:
                self._check_same_tokens(first, name, requests)
                return await self._admit(name, requests, f"{kind} of {first}: {refusal.message}")
            except ServiceError as error:
                told.append(f"its fallback {name!r}: {error.message}")
        raise ServiceError(refusal.status, "; ".join(told), refusal.retry_after, reason=refusal.reason)

    def abort(self, request_id: str, tenant: str = "") -> bool:
        """End a tenant's request, on whichever route it is; False if the tenant has no such request open."""
        aborted = [service.abort(request_id, tenant) for service in self.services]
        return any(aborted)

    def start_draining(self) -> None:
        """From now on every route refuses new requests as UNAVAILABLE."""
        self._draining = True
        for service in self.services:
            service.start_draining()

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the open ones, so long at most; what is left then is ended as
        UNAVAILABLE. Returns whether all had ended by themselves."""
        self.start_draining()
        return all(await asyncio.gather(*(service.drain(seconds) for service in self.services)))

    def resolve(self, name: str | None, kind: str) -> str:
        """The route of a name, of the default one for none. Raises ServiceError, NOT_FOUND."""
        if not name:
            return self.default
        if name not in self._fallbacks:
            served = ", ".join(map(repr, self._fallbacks))
            raise ServiceError(Status.NOT_FOUND, f"{kind} {name!r} is not served here; served: {served}")
        return name

    def _chain(self, name: str, accepted: str) -> Iterator[str]:
        """Where a request may go, in order. Raises ServiceError, NOT_FOUND, for an unknown fallback."""
        yield name
        if accepted:
            if self.resolve(accepted, "fallback route") != name:
                yield accepted
            return
        while (fallback := self._fallbacks[name]) is not None:
            yield fallback
            name = fallback

    def _check_chain(self, name: str) -> None:
        """Raise ValueError unless the fallbacks from here on exist and come to an end."""
        passed = [name]
        while (fallback := self._fallbacks[passed[-1]]) is not None:
            if fallback not in self._fallbacks:
                known = ", ".join(self._fallbacks)
                raise ValueError(
                    f"route {passed[-1]!r} has the fallback {fallback!r}; there are only {known}"
                )
            if fallback in passed:
                raise ValueError(f"the fallbacks form a circle: {' -> '.join((*passed, fallback))}")
            passed.append(fallback)

    def _check_same_tokens(self, first: str, fallback: str, requests: Sequence[GenerateRequest]) -> None:
        """Raise ServiceError if token ids of a request would mean something else on its fallback."""
        if not any(request.names_token_ids for request in requests):
            return
        known, other = self._services.get(first), self._services.get(fallback)
        if known is None or other is None:
            raise ServiceError(
                Status.UNAVAILABLE, "the request names token ids, and not both tokenizers are loaded yet"
            )
        if known.identity.tokenizer_fingerprint != other.identity.tokenizer_fingerprint:
            raise ServiceError(
                Status.INVALID_ARGUMENT, "the request names token ids, and this route has another tokenizer"
            )

    async def _admit(self, name: str, requests: Sequence[GenerateRequest], reason: str) -> list[Generation]:
        if self._draining and name not in self._services:
            raise ServiceError(Status.UNAVAILABLE, "the server is shutting down and takes no new requests")
        service = self.service(name)
        generations: list[Generation] = []
        try:
            for request in requests:
                generations.append(await service.generate(request, reason))
        except BaseException:
            for generation in generations:
                await generation.aclose()
            raise
        return generations
