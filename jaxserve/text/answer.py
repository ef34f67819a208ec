"""The text of one answer as it grows."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.plan import SamplingParams
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.stop_strings import StopStringMatcher
from jaxserve.text.tokenizer import Tokenizer


class AnswerText:
    """One sample's token ids in, exact text out, up to its first stop string.

    As in vLLM, the text of the first `min_tokens` tokens is not searched for stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._matcher = StopStringMatcher(params.stop_strings, params.include_stop_str_in_output)
        self._unsearched_tokens = params.min_tokens
        self._pieces: list[str] = []

    def push(self, token_id: int) -> str:
        """The text that this token adds for the reader to see; nothing once stopped."""
        piece = self._detokenizer.push(token_id)
        if self._unsearched_tokens:
            self._unsearched_tokens -= 1
            return self._emit(piece)
        shown, _ = self._matcher.push(piece)
        return self._emit(shown)

    def finish(self) -> str:
        """The rest, when the answer ended otherwise than by a stop string; else nothing."""
        shown, _ = self._matcher.push(self._detokenizer.finish())
        return self._emit(shown + self._matcher.finish())

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

    @property
    def text(self) -> str:
        """All text shown so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
