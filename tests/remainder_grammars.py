"""Grammars that need no parser: after a token t comes one that leaves the remainder t mod 5."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxserve.plan import Grammar, SamplingParams, pack_token_ids


class RemainderMatcher:
    """After `length` tokens comes only the end; after as many of a negative length, nothing."""

    def __init__(self, length: int, end_ids: Sequence[int], vocab_size: int, eos: int) -> None:
        self._length = length
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self._eos = eos
        self._remainder = 0
        self._num_tokens = 0

    def accept(self, token_id: int) -> None:
        assert token_id in self.allowed(), f"token {token_id} was not in the mask"
        self._num_tokens += 1
        self._remainder = token_id % 5
        if self._length < 0 and self._num_tokens == -self._length:
            raise ValueError("a dead end")

    def mask(self) -> npt.NDArray[np.uint32]:
        return pack_token_ids(self.allowed(), self._vocab_size)

    def copy(self) -> RemainderMatcher:
        return copy.copy(self)

    def allowed(self) -> list[int]:
        """The tokens that may come next."""
        if self._num_tokens == self._length:
            return list(self._end_ids)
        return [t for t in range(self._vocab_size) if t % 5 == self._remainder and t != self._eos]


class RemainderGrammars:
    """Grammars whose text is a length."""

    def __init__(self, vocab_size: int, eos: int) -> None:
        self._vocab_size = vocab_size
        self._eos = eos
        self._length = 0

    def compile(self, grammar: Grammar) -> RemainderGrammars:
        compiled = RemainderGrammars(self._vocab_size, self._eos)
        compiled._length = int(grammar.text)
        return compiled

    def matcher(self, params: SamplingParams, eos_token_ids: Sequence[int] = ()) -> RemainderMatcher:
        end_ids = () if params.ignore_eos else eos_token_ids
        return RemainderMatcher(self._length, end_ids, self._vocab_size, self._eos)


def gated(length: int, **options: object) -> SamplingParams:
    return SamplingParams(grammar=Grammar("regex", str(length)), **options)  # type: ignore[arg-type]
