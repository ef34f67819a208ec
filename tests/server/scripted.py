"""A service whose answers are written beforehand: the tokens are the fake engine's, the text is not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from jaxserve.async_engine import Engine
from jaxserve.loop import HostLoop
from jaxserve.plan import Grammar, SamplingParams
from server.core import Service
from tests.fake_engine import FakeEngine, make_limits
from tests.fake_model import byte_tokenizer
from tests.server.harness import IDENTITY

LIMITS = make_limits(max_model_len=1000, vocab_size=258, eos_token_ids=())


class _ScriptedText:
    """Says a piece with each token, and stops after the last."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = list(pieces)
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        piece = self._pieces.pop(0)
        if not self._pieces:
            self.stopped = "the end"
        return piece

    def finish(self) -> str:
        return ""


class Script:
    """What the next answers say, and what the service asked of the engine."""

    def __init__(self) -> None:
        self.answer: Sequence[str] = ("",)
        """A piece for each token."""
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.grammars: list[Grammar] = []
        """Those that were checked."""
        self._tokenizer = byte_tokenizer()

    async def check(self, grammar: Grammar) -> None:
        """Every grammar passes but one."""
        if grammar.text == "impossible":
            raise ValueError(f"{grammar.kind}: nothing is like that")
        self.grammars.append(grammar)

    def answer_text(self, prompt_ids: Sequence[int], params: SamplingParams) -> _ScriptedText:
        self.prompts.append(self._tokenizer.decode(prompt_ids))
        self.params.append(params)
        return _ScriptedText(self.answer)


@asynccontextmanager
async def scripted_serving(script: Script, template: str) -> AsyncIterator[tuple[Service, HostLoop]]:
    """A running service for a model with this chat template; afterwards every page must be free."""
    loop = HostLoop(FakeEngine(LIMITS), answer_text=script.answer_text)
    engine = Engine(loop)
    try:
        yield Service(IDENTITY, byte_tokenizer(template), engine, grammars=script), loop
    finally:
        engine.close()
    loop.check_integrity()
