"""Whether an answer can be held to a grammar."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from jaxserve.gates import GrammarSource
from jaxserve.plan import Grammar
from server.core.errors import ServiceError, Status

_NUM_THREADS = 8
"""Wait for the compiler's processes, of which there are fewer; known grammars pass them by."""


class GrammarChecker(Protocol):
    """Knows the grammars that an engine can follow."""

    async def check(self, grammar: Grammar) -> None:
        """Raise ValueError, saying why, for a grammar that is malformed or takes too much to follow.

        Bounded in time, and other requests go on meanwhile. A grammar that has passed costs its request
        little more.
        """
        ...


class CompiledGrammars:
    """A GrammarChecker over what the loop takes its grammars from, which keeps those that were compiled."""

    def __init__(self, source: GrammarSource) -> None:
        """source: safe to use from several threads."""
        self._source = source
        # Threads of its own: whoever waits for a hostile grammar keeps nobody else's work waiting.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammars")

    async def check(self, grammar: Grammar) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._source.compile, grammar)


async def check_grammar(checker: GrammarChecker | None, grammar: Grammar | None) -> None:
    """Raise ServiceError: INVALID_ARGUMENT for a bad grammar, UNIMPLEMENTED where the engine follows none."""
    if grammar is None:
        return
    if checker is None:
        raise ServiceError(
            Status.UNIMPLEMENTED, f"grammar {grammar.kind}: answers cannot be held to one here"
        )
    try:
        await checker.check(grammar)
    except ValueError as error:
        raise ServiceError(Status.INVALID_ARGUMENT, f"grammar {error}") from error
