"""A service whose answers are written beforehand: the tokens are the fake engine's, the text is not."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt

from jaxserve.async_engine import Engine
from jaxserve.loop import HostLoop
from jaxserve.plan import Grammar, SamplingParams, pack_token_ids
from server.core import Service
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_model import byte_tokenizer
from tests.server.harness import IDENTITY

PATIENCE = 10.0
"""Seconds that a model waits for an event before it goes on."""

LIMITS = make_limits(max_model_len=1000, vocab_size=258, eos_token_ids=())


class _ScriptedText:
    """Says a piece with each token, and stops after the last."""

    def __init__(self, pieces: Sequence[str | threading.Event]) -> None:
        self._pieces = list(pieces)
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        piece = self._pieces.pop(0)
        while isinstance(piece, threading.Event):
            piece.wait(PATIENCE)
            piece = self._pieces.pop(0)
        if not self._pieces:
            self.stopped = "the end"
        return piece

    def finish(self) -> str:
        return ""


class _AnyToken:
    """A matcher that lets everything through."""

    def accept(self, token_id: int) -> None:
        assert 0 <= token_id < LIMITS.vocab_size

    def mask(self) -> npt.NDArray[np.uint32]:
        return pack_token_ids(range(LIMITS.vocab_size), LIMITS.vocab_size)

    def copy(self) -> _AnyToken:
        return self


class Script:
    """What the next answers say, and what the service asked of the engine."""

    def __init__(self) -> None:
        self.answer: Sequence[str | threading.Event] = ("",)
        """A piece for each token; before one there may be an event that it waits for."""
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self._tokenizer = byte_tokenizer()

    def compile(self, grammar: Grammar) -> Script:
        """Every grammar can be followed but one; the text is not the tokens', so they may be any."""
        if grammar.text == "impossible":
            raise ValueError(f"{grammar.kind}: nothing is like that")
        return self

    def matcher(self, params: SamplingParams, eos_token_ids: Sequence[int] = ()) -> _AnyToken:
        return _AnyToken()

    def answer_text(self, prompt_ids: Sequence[int], params: SamplingParams) -> _ScriptedText:
        self.prompts.append(self._tokenizer.decode(prompt_ids))
        self.params.append(params)
        return _ScriptedText(self.answer)


@asynccontextmanager
async def scripted_serving(script: Script, template: str) -> AsyncIterator[tuple[Service, HostLoop]]:
    """A running service for a model with this chat template; afterwards every page must be free."""
    loop = HostLoop(FakeEngine(LIMITS), answer_text=script.answer_text, grammars=script)
    engine = Engine(loop)
    try:
        yield Service(IDENTITY, byte_tokenizer(template), engine), loop
    finally:
        engine.close()
    loop.check_integrity()
