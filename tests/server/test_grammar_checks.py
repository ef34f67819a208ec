"""Grammars are tried out beside everything else, and not too many at once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jaxserve.plan import Grammar
from jaxserve.structured import CheckLostError
from server.core import ServiceError, Status
from server.core.grammars import MAX_CHECKS, GrammarChecks


class Slow:
    """Takes until it is released for any grammar but one that it knows."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def compile(self, grammar: Grammar) -> Slow:
        if grammar.text != "known":
            assert self.released.wait(30)
        if grammar.text == "bad":
            raise ValueError("regex: no such thing")
        if grammar.text == "lost":
            raise CheckLostError("its process has gone")
        return self

    def matcher(self, *args: object) -> object:
        raise NotImplementedError


def test_no_grammar_is_always_fine() -> None:
    asyncio.run(GrammarChecks(None).check(None))


def test_a_fault_is_the_client_s() -> None:
    source = Slow()
    source.released.set()
    with pytest.raises(ServiceError, match="grammar regex: no such thing") as refused:
        asyncio.run(GrammarChecks(source).check(Grammar("regex", "bad")))  # type: ignore[arg-type]
    assert refused.value.status is Status.INVALID_ARGUMENT


def test_a_lost_check_is_worth_another_try() -> None:
    source = Slow()
    source.released.set()
    with pytest.raises(ServiceError, match="grammar regex: its process has gone") as refused:
        asyncio.run(GrammarChecks(source).check(Grammar("regex", "lost")))  # type: ignore[arg-type]
    assert refused.value.status is Status.UNAVAILABLE
    assert refused.value.retry_after == 1.0


def test_known_grammars_pass_by_slow_ones_and_too_many_are_told_to_come_back() -> None:
    async def main() -> None:
        source = Slow()
        checks = GrammarChecks(source)  # type: ignore[arg-type]
        slow = [asyncio.create_task(checks.check(Grammar("regex", str(i)))) for i in range(MAX_CHECKS - 1)]
        await asyncio.sleep(0)
        await checks.check(Grammar("regex", "known"))
        slow.append(asyncio.create_task(checks.check(Grammar("regex", "one more"))))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="64 grammars wait") as refused:
            await checks.check(Grammar("regex", "known"))
        assert refused.value.status is Status.RESOURCE_EXHAUSTED
        assert refused.value.retry_after == 1.0
        slow.pop().cancel()
        source.released.set()
        await asyncio.gather(*slow)
        await checks.check(Grammar("regex", "known"))

    asyncio.run(main())
