"""Where one answer stands in its grammar."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from jaxserve.plan import pack_token_ids
from jaxserve.structured.parser import check_parser

if TYPE_CHECKING:
    from llguidance import LLMatcher

MaskWords = npt.NDArray[np.uint32]


class GrammarMatcher:
    """Says which token may come next, and follows those that do. Not for several threads at once.

    After a ValueError, which a limit met half-way can cause, it is of no more use.
    """

    def __init__(
        self, parser: LLMatcher, vocab_size: int, end_ids: frozenset[int], permitted: MaskWords | None
    ) -> None:
        """Made by `CompiledGrammar.matcher`; owns `parser`."""
        self._parser = parser
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._ends = pack_token_ids(end_ids, vocab_size)
        self._permitted = ~np.zeros_like(self._ends) if permitted is None else permitted
        self._ended = False
        self._continuations: MaskWords | None = None
        """Tokens that go on with the text; None until they are needed."""

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self._ended or self._parser.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether nothing but the end can follow, or the end has come. Raises ValueError as `mask` does."""
        if self._ended:
            return True
        return self.complete and (self._parser.is_stopped() or not self._continue().any())

    def mask(self) -> MaskWords:
        """[ceil(V / 32)] a bit for each token that may be sampled, lowest first; the caller's to keep.

        The ids that end the request are in it exactly while the text is complete. It is empty only where the
        text is finished and no id ends the request. Takes some 20 microseconds and releases the interpreter's
        lock. Raises ValueError if no token may come before the text is complete, or a limit is met.
        """
        words = self._continue()
        if self.complete:
            return words | (self._ends & self._permitted)
        if not words.any():
            raise ValueError("no token that may be sampled goes on with a text of the grammar")
        return words.copy()

    def accept(self, token_id: int) -> None:
        """Follow a sampled token. Raises ValueError if it was not in the mask, or a limit is met."""
        if self._ended:
            raise ValueError(f"token {token_id} comes after the end of the grammar's text")
        if token_id in self._end_ids:
            if not self.complete:
                raise ValueError(f"token {token_id} ends the text before the grammar does")
            self._ended = True
            return
        self._continuations = None
        if self._parser.is_stopped() or not self._parser.consume_token(token_id):
            check_parser(self._parser)
            raise ValueError(f"token {token_id} comes after the end of the grammar's text")

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens, an end of text included. Raises ValueError if there are not so many."""
        if self._ended and num_tokens:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            self._continuations = None
            if not self._parser.rollback(num_tokens):
                raise ValueError(f"fewer than {num_tokens} tokens to take back")

    def copy(self) -> GrammarMatcher:
        """Another one at the same place."""
        twin = copy.copy(self)
        twin._parser = self._parser.deep_copy()
        return twin

    def _continue(self) -> MaskWords:
        if self._continuations is None:
            self._continuations = self._compute()
        return self._continuations

    def _compute(self) -> MaskWords:
        if self._parser.is_stopped():
            check_parser(self._parser)
            return np.zeros_like(self._ends)
        # llguidance's vocabulary has one more id, its own end of text.
        words = np.zeros(-(-(self._vocab_size + 1) // 32), np.uint32)
        self._parser.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        check_parser(self._parser)
        words[self._vocab_size >> 5] &= ~(np.uint32(1) << np.uint32(self._vocab_size & 31))
        return words[: self._ends.size] & self._permitted & ~self._ends
