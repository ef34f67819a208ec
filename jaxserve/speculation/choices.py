"""The drafters that a user may choose by name."""

from __future__ import annotations

from typing import Literal

from jaxserve.speculation.drafter import Speculation
from jaxserve.speculation.ngram import NgramDrafter

Speculative = Literal["ngram"]
SPECULATIVE: tuple[Speculative, ...] = ("ngram",)
DEFAULT_MAX_DRAFTS = 7
"""A step of eight rows, which are a multiple of what machines like."""


def named_speculation(name: Speculative | None, max_drafts: int) -> Speculation | None:
    """What a name stands for: "ngram" looks answers up in their own text; None drafts nothing."""
    return None if name is None else Speculation(drafter=NgramDrafter, max_drafts=max_drafts, name=name)
