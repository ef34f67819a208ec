"""Token ids to text, one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from jaxserve.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Says each piece of text as soon as it is certain, and never takes one back.

    All pieces together equal `tokenizer.decode(ids, skip_special_tokens, prompt_ids=prompt_ids)`. The
    bytes of a character that is still incomplete wait; the cost of a token does not depend on how many
    came before. (`tokenizers.decoders.DecodeStream` decodes a window twice for each token, never says the
    end of a text that ends in invalid bytes, and says characters that a later byte token turns into
    others.)
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = (), skip_special_tokens: bool = True
    ) -> None:
        """prompt_ids: what comes before; it decides whether a leading space belongs to the text."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._strip = tokenizer.spaces_to_strip(prompt_ids, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token makes certain. Raises ValueError for a negative id."""
        if token_id in self._skipped:
            return ""
        data = self._token_bytes[token_id]
        if self._strip and data:
            data = self._strip_start(data)
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _strip_start(self, data: bytes) -> bytes:
        text = data.lstrip(b" ")
        taken = min(self._strip, len(data) - len(text))
        self._strip = 0 if text else self._strip - taken
        return data[taken:]
