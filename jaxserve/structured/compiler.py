"""Grammars compiled for a model's vocabulary, and kept."""

from __future__ import annotations

import importlib.util
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.plan import Grammar, SamplingParams
from jaxserve.structured.checker import GrammarChecker
from jaxserve.structured.lark import MAX_TEXT, to_lark
from jaxserve.structured.matcher import GrammarMatcher
from jaxserve.structured.parser import build_parser
from jaxserve.structured.vocabulary import GrammarVocabulary
from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_HARMLESS = ("json_object", "choice")
"""Kinds whose compilation takes time in proportion to their text (25,000 choices: 0.1 s)."""


class CompiledGrammar:
    """A grammar ready for any number of answers. Safe to use from several threads."""

    def __init__(self, parser: LLMatcher, vocab_size: int) -> None:
        """Made by `GrammarCompiler.compile`; owns `parser`."""
        self._parser = parser
        self._vocab_size = vocab_size

    def matcher(self, params: SamplingParams, eos_token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """At the start of an answer.

        Args:
            params: its stop token ids and, unless it ignores them, `eos_token_ids` end the text and stand for
                nothing in it; its allowed and bad token ids narrow every mask.
            eos_token_ids: the model's.
        """
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        permitted = params.permitted_tokens(self._vocab_size)
        return GrammarMatcher(self._parser.deep_copy(), self._vocab_size, frozenset(end_ids), permitted)


class GrammarCompiler:
    """One for each model. Safe to use from several threads; close it, or use it as a context."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        cache_size: int = 64,
        num_processes: int = 2,
    ) -> None:
        """Read a vocabulary, which takes about 0.2 s for 50,000 tokens.

        Args:
            tokenizer: the model's.
            vocab_size: the model's, which may differ from the tokenizer's.
            eos_token_ids: the model's; like special tokens they are no text.
            cache_size: grammars kept, those last used.
            num_processes: for compiling grammars that may turn out to be too complex, each at most a second.

        Raises ValueError if the llguidance package is missing.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError("grammars need the llguidance package: pip install llguidance")
        vocabulary = GrammarVocabulary.of(tokenizer, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._tokenizer = vocabulary.to_llguidance()
        self._checker = GrammarChecker(vocabulary, num_processes)
        self._cache_size = cache_size
        self._cache: OrderedDict[Grammar, CompiledGrammar | str] = OrderedDict()
        """A grammar that was refused stays refused: it costs its second only once."""
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, self._checker.close)
        """End what runs in the background; done by itself at exit."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar, compiled now or before. Call it off any loop that others wait for.

        Raises ValueError, naming what is wrong or which limit was passed; CheckLostError, which is not kept,
        if it could not be checked now.
        """
        with self._lock:
            known = self._cache.get(grammar)
            if known is not None:
                self._cache.move_to_end(grammar)
        if known is None:
            known = self._compile(grammar)
            with self._lock:
                self._cache[grammar] = known
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        if isinstance(known, str):
            raise ValueError(known)
        return known

    def __enter__(self) -> GrammarCompiler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _compile(self, grammar: Grammar) -> CompiledGrammar | str:
        """The grammar, or why it is refused."""
        try:
            harmless = grammar.kind in _HARMLESS or len(grammar.text) > MAX_TEXT
            lark = to_lark(grammar) if harmless else self._checker.check(grammar)
            return CompiledGrammar(build_parser(self._tokenizer, lark), self._vocab_size)
        except ValueError as error:
            return f"{grammar.kind}: {error}"
