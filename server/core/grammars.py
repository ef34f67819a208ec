"""Whether an answer can be held to a grammar: found out before the request reaches the engine."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from jaxserve.gates import GrammarSource
from jaxserve.plan import Grammar
from jaxserve.structured import CheckLostError
from server.core.errors import RETRY_SECONDS, ServiceError, Status

MAX_CHECKS = 64
"""At once. The compiler tries out fewer, but each that waits for it has a thread: known ones pass them by."""


class GrammarChecks:
    """Compiles grammars on threads of its own, so that a hostile one keeps nobody else's work waiting."""

    def __init__(self, source: GrammarSource | None) -> None:
        """source: the engine's, which keeps what was compiled; None if it follows no grammars."""
        self._source = source
        self._threads = ThreadPoolExecutor(MAX_CHECKS, thread_name_prefix="grammars")
        self._free = threading.BoundedSemaphore(MAX_CHECKS)

    async def check(self, grammar: Grammar | None) -> None:
        """Raise ServiceError: INVALID_ARGUMENT for a grammar that is malformed or takes too much to follow,
        RESOURCE_EXHAUSTED where too many wait, UNAVAILABLE where what checks them is gone for now,
        UNIMPLEMENTED where the engine follows none."""
        if grammar is None or self._source is None:
            follow(self._source, grammar)
            return
        if not self._free.acquire(blocking=False):
            raise ServiceError(
                Status.RESOURCE_EXHAUSTED,
                f"{MAX_CHECKS} grammars wait to be compiled already, which is the limit",
                RETRY_SECONDS,
                reason="grammars",
            )
        work = self._threads.submit(follow, self._source, grammar)
        # Not when the wait ends: that may be given up before the work is done.
        work.add_done_callback(lambda _: self._free.release())
        await asyncio.wrap_future(work)


def follow(source: GrammarSource | None, grammar: Grammar | None) -> None:
    """Compile a grammar, which takes a while the first time.

    Raises ServiceError: INVALID_ARGUMENT for one that is malformed or takes too much to follow, UNAVAILABLE
    for one that could not be checked now, UNIMPLEMENTED where there is nothing to follow it.
    """
    if grammar is None:
        return
    if source is None:
        raise ServiceError(
            Status.UNIMPLEMENTED, f"grammar {grammar.kind}: answers cannot be held to one here"
        )
    try:
        source.compile(grammar)
    except ValueError as error:
        raise ServiceError(Status.INVALID_ARGUMENT, f"grammar {error}") from error
    except CheckLostError as error:
        raise ServiceError(Status.UNAVAILABLE, f"grammar {grammar.kind}: {error}", RETRY_SECONDS) from error
