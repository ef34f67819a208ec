"""Long texts cut into windows, each read on its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Window:
    """A piece of a text that is read on its own."""

    token_ids: npt.NDArray[np.int32]
    """The tokens that open any text, then those of the piece."""


def cut_windows(
    tokenizer: Tokenizer, text: str, *, context: int, max_tokens: int | None = None
) -> list[Window]:
    """A text as windows, each with the tokens before it that the model expects at a beginning.

    Args:
        tokenizer: of both models.
        text: what to read.
        context: most tokens of a window; its first token is not scored, having nothing before it.
        max_tokens: most tokens of the text; None for all.

    Raises ValueError for a context below 2, or a text of fewer than 2 tokens.
    """
    opening = _opening(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    piece_len = context - len(opening)
    if piece_len < 1 or context < 2:
        raise ValueError(
            f"context {context} leaves no token to score; at least {len(opening) + 2} are needed"
        )
    pieces = [opening + ids[first : first + piece_len] for first in range(0, len(ids), piece_len)]
    windows = [Window(np.asarray(piece, np.int32)) for piece in pieces if len(piece) > 1]
    if not windows:
        raise ValueError(f"a text of {len(ids)} tokens has none to score; at least 2 are needed")
    return windows


def _opening(tokenizer: Tokenizer) -> list[int]:
    """What stands before every text, but not after it."""
    marked = tokenizer.encode("a")
    plain = tokenizer.encode("a", add_special_tokens=False)
    return marked[: marked.index(plain[0])] if plain and plain[0] in marked else []
