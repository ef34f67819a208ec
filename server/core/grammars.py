"""Whether an answer can be held to a grammar."""

from __future__ import annotations

from typing import Protocol

from jaxserve.plan import Grammar
from server.core.errors import ServiceError, Status


class GrammarChecker(Protocol):
    """Knows the grammars that an engine can follow."""

    async def check(self, grammar: Grammar) -> None:
        """Raise ValueError, saying why, for a grammar that is malformed or takes too much to follow.

        Bounded in time, and other requests go on meanwhile. A grammar that has passed costs its request
        little more.
        """
        ...


async def check_grammar(checker: GrammarChecker | None, grammar: Grammar | None) -> None:
    """Raise ServiceError: INVALID_ARGUMENT for a bad grammar, UNIMPLEMENTED where the engine follows none."""
    if grammar is None:
        return
    if checker is None:
        raise ServiceError(
            Status.UNIMPLEMENTED, f"grammar of kind {grammar.kind}: this model's answers cannot be held to it"
        )
    try:
        await checker.check(grammar)
    except ValueError as error:
        raise ServiceError(Status.INVALID_ARGUMENT, f"grammar of kind {grammar.kind}: {error}") from error
