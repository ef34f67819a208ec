"""A model's vocabulary as `llguidance` sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.text import Tokenizer

if TYPE_CHECKING:
    import llguidance


@dataclass(frozen=True)
class GrammarVocabulary:
    """The bytes of each token id, none for those that are not text. Plain data: it travels to a process."""

    tokens: tuple[bytes, ...]
    """One for each of the model's ids, which may be more than the tokenizer's."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarVocabulary:
        """Special tokens and ends of text are no text, however they are written."""
        silent = {*tokenizer.special_ids, *eos_token_ids}
        return cls(
            tuple(
                b"" if token_id in silent else tokenizer.token_bytes[token_id]
                for token_id in range(vocab_size)
            )
        )

    def to_llguidance(self) -> llguidance.LLTokenizer:
        """Takes about 0.2 s for 50,000 tokens.

        Its end of text is an id of its own, one past the vocabulary: what may end an answer differs between
        requests, and is theirs to say.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Backend(self)), eos_token=[len(self.tokens)])


class _Backend:
    """The attributes that `TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = [*vocabulary.tokens, b"end"]
        self.eos_token_id = len(vocabulary.tokens)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: Any) -> list[int]:
        raise NotImplementedError("grammars force no tokens, so no text is ever tokenized for them")
